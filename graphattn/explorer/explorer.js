// The explorer: reads the data of the page, and draws its views. No framework, no network.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const N = data.num_tokens;

// --- Data: base64 text to typed arrays, packed edges to rows -------------------------------------

function numbers(text, Kind) {
  return new Kind(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function rowsOf(pack) {
  const counts = numbers(pack.counts, Uint16Array);
  const rowptr = new Uint32Array(N + 1);
  if (pack.sources !== undefined) {
    for (let i = 0; i < N; i++) rowptr[i + 1] = rowptr[i] + counts[i];
    return { rowptr, source: numbers(pack.sources, Uint16Array) };
  }
  const runs = numbers(pack.runs, Uint16Array);
  let total = 0;
  for (let r = 1; r < runs.length; r += 2) total += runs[r];
  const source = new Uint16Array(total);
  for (let i = 0, r = 0, e = 0; i < N; i++) {
    for (const end = r + 2 * counts[i]; r < end; r += 2) {
      for (let j = 0; j < runs[r + 1]; j++) source[e++] = runs[r] + j;
    }
    rowptr[i + 1] = e;
  }
  return { rowptr, source };
}

function targetsOf(rows, token) {
  const found = [];
  for (let i = 0; i < N; i++) {
    for (let e = rows.rowptr[i]; e < rows.rowptr[i + 1]; e++) {
      if (rows.source[e] === token) found.push(i);
    }
  }
  return found;
}

const graphs = (data.graphs || []).map((graph) => ({ ...graph, rows: rowsOf(graph.edges) }));
const calls = (data.calls || []).map((call) => {
  const rows = rowsOf(call.edges);
  const degrees = call.degrees && numbers(call.degrees, Uint16Array);
  return { ...call, rows, degrees, all: numbers(call.weights, Uint16Array), levels: new Map() };
});

// Weights of a head in 0..1; head -1 is the mean of all heads.
function weightsOf(call, head) {
  const E = call.rows.source.length;
  if (!call.levels.has(head)) {
    const weights = new Float32Array(E);
    const heads = head < 0 ? [...Array(call.heads).keys()] : [head];
    for (const h of heads) {
      for (let e = 0; e < E; e++) weights[e] += call.all[h * E + e] / 65535 / heads.length;
    }
    weights.largest = weights.reduce((a, b) => Math.max(a, b), 1e-9);
    call.levels.set(head, weights);
  }
  return call.levels.get(head);
}

// The layer at which the information of every token arrives at `token`; 0 is itself, -1 is never.
function arrivals(rows, token) {
  const layer = new Int16Array(N).fill(-1);
  let reached = [token];
  layer[token] = 0;
  for (let depth = 1; reached.length; depth++) {
    const next = [];
    for (const i of reached) {
      for (let e = rows.rowptr[i]; e < rows.rowptr[i + 1]; e++) {
        const j = rows.source[e];
        if (layer[j] < 0) { layer[j] = depth; next.push(j); }
      }
    }
    reached = next;
  }
  return layer;
}

// --- State ---------------------------------------------------------------------------------------

const state = {
  token: N >> 1, hovered: null, graph: data.shown || 0, layers: 1, call: calls.length ? 0 : -1,
  head: -1, zoom: 1, x: 0, y: 0, turn: 0, tilt: 0, step: 0,
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const current = () => (state.hovered === null ? state.token : state.hovered);
const call = () => (state.call < 0 ? null : calls[state.call]);
const shownRows = () => (call() || graphs[state.graph]).rows;
const shownWeights = () => (call() ? weightsOf(call(), state.head) : null);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// Scales that get farther from the paper; cividis-like for weights, viridis for layers.
const SCALES = {
  weight: { light: ["#dde3ec", "#8fb0d9", "#3a6cb5", "#12275c"],
            dark: ["#26324a", "#3f6fb5", "#8fbdf0", "#fff3c4"] },
  layer: { light: ["#440154", "#3b528b", "#21918c", "#44a05c", "#a8a11f"],
           dark: ["#fde725", "#5ec962", "#21a19c", "#5b78b8", "#6d4a86"] },
};
const CLUSTERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b3a500",
                  "#888888"];
const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

function scale(name, share) {
  const stops = SCALES[name][dark.matches ? "dark" : "light"].map(hex);
  const place = clamp(share, 0, 1) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((value, c) => Math.round(value + (stops[low + 1][c] - value) * (place - low)));
}
const css = (rgb) => `rgb(${rgb.join(" ")})`;
const scaleCss = (name, share) => css(scale(name, share));

// --- What is known of the token: one object for the text and for all views -----------------------

let known = { key: null };
function facts() {
  const token = current();
  const key = [token, state.graph, state.call, state.head].join();
  if (known.key === key) return known;
  known = { key, token };
  if (!graphs.length) return known;
  const rows = shownRows(), weights = shownWeights();
  const first = rows.rowptr[token], last = rows.rowptr[token + 1];
  known.sources = Array.from(rows.source.subarray(first, last));
  known.weights = weights && Array.from(weights.subarray(first, last));
  known.targets = targetsOf(rows, token);
  known.arrivals = arrivals(graphs[state.graph].rows, token);
  known.weightOf = new Map(weights ? known.sources.map((j, at) => [j, known.weights[at]]) : []);
  known.largest = weights ? Math.max(1e-9, ...known.weights) : 0;
  return known;
}

const name = (token) => (data.labels ? `${token} (${data.labels[token]})` : `${token}`);
const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function ranges(tokens) {
  const parts = [];
  for (let at = 0; at < tokens.length; ) {
    let end = at;
    while (end + 1 < tokens.length && tokens[end + 1] === tokens[end] + 1) end++;
    parts.push(end > at + 1 ? `${tokens[at]}–${tokens[end]}`
      : tokens.slice(at, end + 1).map((t) => (tokens.length < 9 ? name(t) : t)).join(", "));
    at = end + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")}, …` : parts.join(", ");
}

function sentence() {
  const { token, sources, targets, weights } = facts();
  let text = `token ${name(token)}`;
  if (sources) {
    const degrees = call() && call().degrees; // only if the page has not all sources of the layer
    text += ` sees ${many(degrees ? degrees[token] : sources.length, "token")}`;
    if (degrees) text += `, of which this page has ${sources.length.toLocaleString("en")}`;
    text += `${sources.length ? ": " : ""}${ranges(sources)}`;
    text += degrees ? "." : `; ${many(targets.length, "token")} ${targets.length === 1 ? "sees" : "see"} it.`;
  }
  if (weights && sources.length) {
    const order = [...sources.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 5);
    const most = order.map((at) => `${name(sources[at])} with ${weights[at].toFixed(3)}`);
    text += ` It attends most to ${most.join(", ")}.`;
  }
  if (data.flow) text += `${sources ? " It" : ""} ends in cluster ${data.flow.clusters[token] + 1}.`;
  return text;
}

let speaking = 0;
function write() {
  $("said").textContent = sentence();
  if (state.hovered === null) { // what the mouse only passes is not spoken
    clearTimeout(speaking);
    speaking = setTimeout(() => { $("live").textContent = $("said").textContent; }, 300);
  }
  for (const id of ["token", "token-number"]) {
    if ($(id) !== document.activeElement || $(id).type === "range") $(id).value = current();
  }
  if (data.flow) {
    const count = data.flow.counts[state.step];
    $("step-value").textContent = data.flow.steps[state.step];
    $("clusters").textContent = `Step ${data.flow.steps[state.step]}: ${many(count, "cluster")}.`;
  }
  if (!graphs.length) return;
  const graph = graphs[state.graph], { arrivals: layer, token } = facts();
  $("layers").max = Math.max(1, graph.layers === null ? 64 : graph.layers);
  state.layers = Math.min(state.layers, Number($("layers").max));
  const count = layer.reduce((sum, at) => sum + (at >= 0 && at <= state.layers), 0);
  $("layers-value").textContent = state.layers;
  $("reach").textContent = `After ${many(state.layers, "layer")}, information of ` +
    `${count.toLocaleString("en")} of ${many(N, "token")} can reach token ${name(token)}.`;
  $("settled").textContent = `${many(graph.num_edges, "edge")}. ${graph.reach}`;
  if (data.option) $("option-value").textContent = data.values[state.graph];
  $("fiedler").textContent = graph.words;
  const kind = call() ? "weight" : "layer";
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => scaleCss(kind, share));
  $("bar").style.background = `linear-gradient(to right, ${stops.join()})`;
  $("legend").textContent = call() ? `weight from 0 to ${facts().largest.toFixed(3)} in this row, ` +
    `to ${shownWeights().largest.toFixed(3)} in the matrix`
    : state.layers > 1 ? `layer of arrival, 1 to ${state.layers}` : "layer of arrival: 1";
}

// --- Canvases ------------------------------------------------------------------------------------

// A context in CSS pixels, sharp on dense screens; cleared.
function fresh(canvas) {
  const dense = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * dense) || canvas.height !== Math.round(height * dense)) {
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
  }
  const context = canvas.getContext("2d");
  context.setTransform(dense, 0, 0, dense, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height, dense };
}

// What does not depend on the token is painted once, and copied until its key changes.
const layers = new Map();
function copied(which, key, canvas, paint) {
  if (!canvas.width || !canvas.height) return; // before the layout of the page; it is drawn again after
  const size = `${canvas.width}x${canvas.height}:${dark.matches}:${key}`;
  let kept = layers.get(which);
  if (!kept || kept.size !== size) {
    kept = { size, canvas: document.createElement("canvas") };
    kept.canvas.width = canvas.width;
    kept.canvas.height = canvas.height;
    paint(kept.canvas);
    layers.set(which, kept);
  }
  const context = canvas.getContext("2d");
  context.save();
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.drawImage(kept.canvas, 0, 0);
  context.restore();
}

const EDGE = 12; // CSS pixels for the strips above and beside the matrix
const span = () => N / state.zoom;

// Each edge is at least one pixel; where several fall on one, the largest weight is seen.
function paintMatrix(target, offset) {
  const context = target.getContext("2d"), size = target.width - offset;
  const rows = shownRows(), weights = shownWeights(), cell = size / span();
  const gap = cell >= 8 * (window.devicePixelRatio || 1) ? 1 : 0;
  const level = new Uint8Array(size * size);
  const place = (at, from) => Math.round((at - from) * cell);
  for (let i = Math.floor(state.y); i < Math.min(N, state.y + span()); i++) {
    const top = clamp(place(i, state.y), 0, size - 1);
    const bottom = clamp(place(i + 1, state.y) - gap, top + 1, size);
    for (let e = rows.rowptr[i]; e < rows.rowptr[i + 1]; e++) {
      const from = place(rows.source[e], state.x);
      if (from >= size || place(rows.source[e] + 1, state.x) < 0) continue;
      const left = clamp(from, 0, size - 1);
      const right = clamp(place(rows.source[e] + 1, state.x) - gap, left + 1, size);
      const value = weights ? 1 + Math.round(254 * Math.sqrt(weights[e] / weights.largest)) : 255;
      for (let y = top; y < bottom; y++) {
        for (let x = left; x < right; x++) {
          if (level[y * size + x] < value) level[y * size + x] = value;
        }
      }
    }
  }
  const image = context.createImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer), table = new Uint32Array(256);
  const plain = hex(color("edge").trim());
  for (let value = 1; value < 256; value++) {
    const [r, g, b] = weights ? scale("weight", value / 255) : plain;
    table[value] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  for (let at = 0; at < level.length; at++) pixels[at] = table[level[at]];
  context.putImageData(image, offset, offset);
}

function drawMatrix() {
  const canvas = $("matrix"), { context, width, dense } = fresh(canvas);
  const key = [state.graph, state.call, state.head, state.zoom, state.x, state.y].join();
  copied("matrix", key, canvas, (onto) => paintMatrix(onto, Math.round(EDGE * dense)));
  const cell = (width - EDGE) / span(), thick = Math.max(cell, 2);
  const { token, sources, targets } = facts();
  const across = (j) => EDGE + (j - state.x) * cell, down = (i) => EDGE + (i - state.y) * cell;
  for (let j = Math.floor(state.x); j < Math.min(N, state.x + span()); j++) {
    const shade = tokenColor(j);
    if (!shade || across(j) < EDGE - 1) continue;
    context.fillStyle = shade;
    context.fillRect(Math.floor(across(j)), 0, Math.ceil(cell), EDGE - 3);
  }
  context.fillStyle = color("target");
  for (const i of targets) if (down(i) > EDGE - 1) context.fillRect(0, Math.floor(down(i)), EDGE - 3, Math.ceil(cell));
  context.save();
  context.beginPath();
  context.rect(EDGE, EDGE, width, width);
  context.clip();
  if (!call()) {
    context.fillStyle = color("source");
    for (const j of sources) context.fillRect(across(j), down(token), Math.max(1, cell), thick);
    context.fillStyle = color("target");
    for (const i of targets) context.fillRect(across(token), down(i), thick, Math.max(1, cell));
  }
  context.lineWidth = 1.5;
  context.strokeStyle = color("source");
  context.strokeRect(EDGE - 5, down(token) - 0.5, width + 10, thick + 1);
  context.strokeStyle = color("target");
  context.strokeRect(across(token) - 0.5, EDGE - 5, thick + 1, width + 10);
  context.restore();
  drawLabel(context, across(token) + cell, down(token));
}

// The name of the token beside it, on paper, so that it can be read over edges.
function drawLabel(context, x, y) {
  const { token } = facts(), left = x < context.canvas.clientWidth / 2;
  if (Number.isNaN(x)) return;
  context.font = "600 13px system-ui, sans-serif";
  context.textAlign = left ? "left" : "right";
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = color("paper");
  context.fillStyle = color("ink");
  const at = [name(token), x + (left ? 10 : -10), Math.max(y - 8, 14)];
  context.strokeText(...at);
  context.fillText(...at);
}

// By what the token attends to, or by the layer at which information arrives; null for neither.
function tokenColor(j) {
  const { weightOf, largest, arrivals: layer, token } = facts();
  if (j === token) return color("token");
  if (call()) return weightOf.has(j) ? scaleCss("weight", Math.sqrt(weightOf.get(j) / largest)) : null;
  const at = layer[j];
  if (at < 1 || at > state.layers) return null;
  return scaleCss("layer", state.layers === 1 ? 0 : (at - 1) / (state.layers - 1));
}

// --- The drawing: places of the tokens on the canvas, then edges, then tokens ---------------------

const places = data.positions ? numbers(data.positions, Float32Array) : null;
const bounds = places && (() => {
  const D = data.dimensions, middle = Array(D).fill(0);
  let count = 0, reach = 0;
  for (let i = 0; i < N; i++) {
    if (Number.isNaN(places[i * D])) continue;
    count++;
    for (let d = 0; d < D; d++) middle[d] += places[i * D + d];
  }
  middle.forEach((_, d) => { middle[d] /= count || 1; });
  for (let i = 0; i < N; i++) {
    const far = Math.hypot(...middle.map((m, d) => places[i * D + d] - m));
    if (far > reach) reach = far;
  }
  return { middle, reach: reach || 1 };
})();

function layout(width, height) {
  const shape = $("shape").value, points = [];
  const D = data.dimensions, half = Math.min(width, height) / 2 - 14;
  const [a, b] = [state.turn, state.tilt].map((degrees) => (degrees * Math.PI) / 180);
  for (let i = 0; i < N; i++) {
    if (shape === "line") { // the columns that the matrix shows
      points.push([14 + ((i + 0.5 - state.x) / span()) * (width - 28), height / 2, 0]);
    } else if (shape === "circle") {
      const angle = (2 * Math.PI * i) / N - Math.PI / 2;
      points.push([width / 2 + half * Math.cos(angle), height / 2 + half * Math.sin(angle), 0]);
    } else {
      const [x, y, z = 0] = bounds.middle.map((m, d) => (places[i * D + d] - m) / bounds.reach);
      const across = x * Math.cos(a) + z * Math.sin(a), back = z * Math.cos(a) - x * Math.sin(a);
      const up = y * Math.cos(b) - back * Math.sin(b), depth = back * Math.cos(b) + y * Math.sin(b);
      const sign = D === 3 ? -1 : 1; // in a plane, rows of an image go down
      points.push([width / 2 + half * across, height / 2 + sign * half * up, depth]);
    }
  }
  if (shape === "line") points.widest = (farthest() / span()) * (width - 28) / 2;
  return points;
}

// The largest distance between a token and a source, by which the arcs are scaled.
function farthest() {
  const rows = shownRows();
  if (!rows.farthest) {
    rows.farthest = 1;
    for (let i = 0; i < N; i++) {
      for (let e = rows.rowptr[i]; e < rows.rowptr[i + 1]; e++) {
        rows.farthest = Math.max(rows.farthest, Math.abs(i - rows.source[e]));
      }
    }
  }
  return rows.farthest;
}

function pathOf(context, points, j, i, { width, height }) {
  const [x1, y1] = points[j], [x2, y2] = points[i], shape = $("shape").value;
  context.moveTo(x1, y1);
  if (shape === "line") { // sources before the token are above the line, those after it below
    const rx = Math.abs(x2 - x1) / 2, ry = rx * Math.min(8, (height / 2 - 20) / points.widest);
    context.ellipse((x1 + x2) / 2, y1, rx, ry, 0, x1 < x2 ? Math.PI : 0, x1 < x2 ? 0 : Math.PI);
  } else if (shape === "circle") {
    context.quadraticCurveTo((x1 + x2 + width) / 4, (y1 + y2 + height) / 4, x2, y2);
  } else context.lineTo(x2, y2);
}

const MOST_LINES = 6000;
function drawDrawing() {
  const canvas = $("drawing"), box = fresh(canvas), { context, width, height, dense } = box;
  if ($("shape").value === "places" && data.dimensions === 3) drawTrace(box);
  else {
    const points = layout(width, height), rows = shownRows(), weights = shownWeights();
    const E = rows.source.length;
    const limit = !weights || E <= MOST_LINES ? 0 : Float32Array.from(weights).sort()[E - MOST_LINES];
    const key = [state.graph, state.call, state.head, $("shape").value, state.zoom, state.x].join();
    const all = weights || E <= 3 * MOST_LINES;
    $("left-out").textContent = limit ? `The ${MOST_LINES} largest weights are drawn.`
      : all ? "" : "With so many edges, only those of the token are drawn.";
    copied("drawing", key, canvas, (onto) => {
      const under = onto.getContext("2d");
      under.scale(dense, dense);
      under.lineWidth = 0.8;
      under.strokeStyle = color("edge");
      under.globalAlpha = weights ? 1 : clamp(600 / E, 0.12, 0.6);
      for (let i = 0; all && i < N; i++) {
        for (let e = rows.rowptr[i]; e < rows.rowptr[i + 1]; e++) {
          if (rows.source[e] === i || (weights && weights[e] < limit)) continue;
          under.beginPath();
          if (weights) {
            const share = Math.sqrt(weights[e] / weights.largest);
            under.strokeStyle = scaleCss("weight", share);
            under.globalAlpha = 0.15 + 0.6 * share;
          }
          pathOf(under, points, rows.source[e], i, box);
          under.stroke();
        }
      }
    });
    drawOwn(box, points);
    const seen = $("shape").value === "line" ? span() : N;
    drawTokens(context, points, [...points.keys()], clamp(width / seen / 2, 1.5, 6));
  }
}

// The edges of the token: sources in the colour of sources, or by their weights.
function drawOwn(box, points) {
  const { context } = box, { token, sources, targets, weights, largest } = facts();
  const draw = (from, to, shade, wide) => {
    if (from === to || !(points[from][0] + points[to][0] > 0)) return; // NaN: without a place
    context.beginPath();
    context.strokeStyle = shade;
    context.lineWidth = wide;
    pathOf(context, points, from, to, box);
    context.stroke();
  };
  context.globalAlpha = clamp(30 / (sources.length + targets.length), 0.15, 0.9);
  if (!call()) for (const i of targets) draw(token, i, color("target"), 1.2);
  sources.forEach((j, at) => draw(j, token, color("source"),
    weights ? 0.3 + 3 * Math.sqrt(weights[at] / largest) : 1.4));
  context.globalAlpha = 1;
}

function drawTokens(context, points, order, radius) {
  const { token } = facts();
  for (const i of [...order, token]) {
    const [x, y] = points[i], shade = tokenColor(i);
    context.fillStyle = shade || color("edge");
    context.beginPath();
    context.arc(x, y, (shade ? 1.5 : 1) * radius + (i === token ? 2.5 : 0), 0, 2 * Math.PI);
    context.fill();
    if (i === token) {
      context.lineWidth = 2;
      context.strokeStyle = color("paper");
      context.stroke();
    }
  }
  drawLabel(context, ...points[token]);
}

// The C-alpha trace, the parts behind first and thinner.
function drawTrace(box) {
  const { context, width, height } = box, points = layout(width, height);
  const order = [...points.keys()].sort((a, b) => (points[a][2] || 0) - (points[b][2] || 0));
  const bonds = data.bonds || [];
  $("left-out").textContent = "Lines other than the trace are those of the token. Drag to turn.";
  context.lineCap = "round";
  for (const i of order) {
    const front = (points[i][2] + 1) / 2;
    context.lineWidth = clamp(700 / N, 2, 7) * (0.45 + 0.75 * front);
    for (const [to, joined] of [[i - 1, bonds[i - 1]], [i + 1, bonds[i]]]) {
      if (!joined) continue; // each residue draws its half of a bond
      context.strokeStyle = tokenColor(i) || color("edge");
      context.globalAlpha = 0.4 + 0.6 * front;
      context.beginPath();
      context.moveTo(points[i][0], points[i][1]);
      context.lineTo((points[i][0] + points[to][0]) / 2, (points[i][1] + points[to][1]) / 2);
      context.stroke();
    }
  }
  context.globalAlpha = 1;
  drawOwn(box, points);
  drawTokens(context, points, order, clamp(250 / N, 1, 3));
}

// --- Charts: the spectrum, and the number of clusters per step -----------------------------------

function chart(svg, values, mark, labels) {
  const largest = Math.max(...values) || 1, last = Math.max(1, values.length - 1);
  const at = (i) => [34 + (i / last) * 350, 188 - (values[i] / largest) * 160];
  const line = Array.from(values, (_, i) => at(i).map((v) => v.toFixed(1)).join()).join(" ");
  const [x, y] = at(Math.min(mark, values.length - 1));
  svg.innerHTML = `<path class="axis" fill="none" d="M34 20V188H390"/>` +
    `<polyline class="curve" points="${line}"/><circle class="mark" cx="${x}" cy="${y}" r="5"/>` +
    `<text x="38" y="18">${labels[0]} (largest ${Number(largest.toPrecision(4))})</text>` +
    `<text x="390" y="208" text-anchor="end">${labels[1]}</text>`;
}

function drawSpectrum() {
  const graph = graphs[state.graph];
  $("spectrum").style.display = graph.spectrum ? "" : "none";
  if (!graph.spectrum) return;
  graph.values = graph.values || numbers(graph.spectrum, Float32Array);
  chart($("spectrum"), graph.values, 1, ["eigenvalue", `all ${N}, in order; the dot is the Fiedler value`]);
}

const points2d = data.flow ? numbers(data.flow.points, Uint16Array) : null;
function flowPoint(i, width) {
  const at = 2 * (state.step * N + i), side = width - 32;
  return [16 + (points2d[at] / 65535) * side, 16 + (1 - points2d[at + 1] / 65535) * side];
}

function drawFlow() {
  const { context, width } = fresh($("flow")), radius = clamp(width / Math.sqrt(N) / 6, 2, 6);
  for (const i of [...Array(N).keys(), current()]) {
    const [x, y] = flowPoint(i, width), own = i === current();
    context.fillStyle = CLUSTERS[data.flow.clusters[i] % CLUSTERS.length];
    context.globalAlpha = own ? 1 : 0.8;
    context.beginPath();
    context.arc(x, y, radius + (own ? 2 : 0), 0, 2 * Math.PI);
    context.fill();
    context.lineWidth = own ? 2 : 0.5;
    context.strokeStyle = own ? color("token") : color("paper");
    context.stroke();
  }
  const { steps, counts } = data.flow;
  chart($("counts"), counts, state.step, ["clusters", `step, ${steps[0]} to ${steps[steps.length - 1]}`]);
}

let due = false;
function render() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    write();
    if (graphs.length) { drawMatrix(); drawDrawing(); drawSpectrum(); }
    if (data.flow) drawFlow();
  });
}

// --- Input: mouse, touch, keys, sliders ----------------------------------------------------------

function focusToken(token) {
  state.token = clamp(Math.round(token) || 0, 0, N - 1);
  state.hovered = null;
  const outside = (from) => state.token < from || state.token >= from + span();
  if (outside(state.y)) state.y = clamp(state.token - span() / 2, 0, N - span());
  if (outside(state.x)) state.x = clamp(state.token - span() / 2, 0, N - span());
  render();
}

function zoom(factor, x = state.token, y = state.token) {
  const before = state.zoom;
  state.zoom = clamp(state.zoom * factor, 1, Math.max(1, N / 8));
  const move = (from, at) => clamp(at - ((at - from) * before) / state.zoom, 0, N - span());
  [state.x, state.y] = [move(state.x, x), move(state.y, y)];
  $("matrix").style.touchAction = state.zoom > 1 ? "none" : "";
  render();
}

function turn(by, tilt) {
  state.turn = ((state.turn + by + 540) % 360) - 180;
  state.tilt = clamp(state.tilt + tilt, -90, 90);
  $("turn").value = state.turn;
  $("tilt").value = state.tilt;
  render();
}

function cellAt(x, y) {
  const cell = ($("matrix").clientWidth - EDGE) / span();
  const [i, j] = [state.y + (y - EDGE) / cell, state.x + (x - EDGE) / cell].map(Math.floor);
  return i < 0 || j < 0 || i >= N || j >= N ? null : [i, j];
}

function nearest(points, x, y, line) {
  let best = null, least = 30 ** 2;
  points.forEach(([px, py], i) => {
    const far = (px - x) ** 2 + (line ? 0 : (py - y) ** 2);
    if (far < least) [best, least] = [i, far];
  });
  return best;
}

const find = {
  matrix: (x, y) => {
    const cell = cellAt(x, y);
    $("pointed").textContent = cell ? pairText(...cell) : "";
    return cell && cell[0];
  },
  drawing: (x, y) => {
    const { clientWidth, clientHeight } = $("drawing");
    return nearest(layout(clientWidth, clientHeight), x, y, $("shape").value === "line");
  },
  flow: (x, y) => {
    const width = $("flow").clientWidth;
    return nearest([...Array(N).keys()].map((i) => flowPoint(i, width)), x, y, false);
  },
};

function pairText(i, j) {
  const rows = shownRows(), weights = shownWeights();
  for (let e = rows.rowptr[i]; e < rows.rowptr[i + 1]; e++) {
    if (rows.source[e] === j) {
      return `${name(i)} sees ${name(j)}${weights ? ` with weight ${weights[e].toFixed(3)}` : ""}`;
    }
  }
  return `${name(i)} does not see ${name(j)}`;
}

const drag = {
  matrix: (dx, dy) => {
    const cell = ($("matrix").clientWidth - EDGE) / span();
    state.x = clamp(state.x - dx / cell, 0, N - span());
    state.y = clamp(state.y - dy / cell, 0, N - span());
    render();
  },
  drawing: (dx, dy) => { if ($("turn") && $("shape").value === "places") turn(dx / 2, dy / 2); },
  flow: () => {},
};
const KEYS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -10, PageDown: 10,
               Home: -N, End: N };

for (const id of Object.keys(find)) {
  const canvas = $(id);
  if (!canvas) continue;
  let from = null, moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    [from, moved] = [event, 0];
    if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from) {
      const dx = event.clientX - from.clientX, dy = event.clientY - from.clientY;
      moved += Math.abs(dx) + Math.abs(dy);
      from = event;
      if (moved > 4) drag[id](dx, dy);
    } else if (event.pointerType === "mouse") {
      state.hovered = find[id](event.offsetX, event.offsetY);
      render();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const token = from && moved <= 4 ? find[id](event.offsetX, event.offsetY) : null;
    from = null;
    if (token !== null) focusToken(token);
  });
  canvas.addEventListener("pointercancel", () => { from = null; });
  canvas.addEventListener("pointerleave", () => { state.hovered = null; render(); });
  canvas.addEventListener("keydown", (event) => {
    const by = KEYS[event.key];
    if (by) focusToken(state.token + by);
    else if (id === "matrix" && "+-0=".includes(event.key)) zoom({ "+": 2, "=": 2, "-": 0.5, 0: 1e-9 }[event.key]);
    else return;
    event.preventDefault();
  });
}

// The wheel scrolls the page; on the matrix it zooms with Ctrl (as pinching does), or after a click.
if ($("matrix")) {
  $("matrix").addEventListener("wheel", (event) => {
    const cell = cellAt(event.offsetX, event.offsetY);
    if (!cell || !(event.ctrlKey || document.activeElement === $("matrix"))) return;
    event.preventDefault();
    zoom(2 ** (-event.deltaY / 200), cell[1], cell[0]);
  }, { passive: false });
}

function on(id, event, act) {
  if ($(id)) $(id).addEventListener(event, () => act($(id).value));
}
on("token", "input", focusToken);
on("token-number", "input", (value) => { if (value !== "") focusToken(value); });
on("layers", "input", (value) => { state.layers = Number(value); render(); });
on("option", "input", (value) => { state.graph = Number(value); render(); });
on("head", "change", (value) => { state.head = Number(value); render(); });
on("call", "change", (value) => { state.call = Number(value); listHeads(); render(); });
on("shape", "change", render);
on("turn", "input", (value) => turn(value - state.turn, 0));
on("tilt", "input", (value) => turn(0, value - state.tilt));
on("closer", "click", () => zoom(2));
on("farther", "click", () => zoom(0.5));
on("whole", "click", () => zoom(1e-9));
on("step", "input", (value) => { stop(); state.step = Number(value); render(); });

function listHeads() {
  const heads = call() ? call().heads : 0;
  $("head").disabled = !heads;
  if (state.head >= heads) state.head = -1;
  $("head").replaceChildren(...[-1, ...Array(heads).keys()].map((head) =>
    new Option(head < 0 ? "mean of heads" : `${head}`, head, false, head === state.head)));
}

// Playing is asked for, so it also runs where motion is reduced: slower, without a jump to the start.
let playing = 0;
function stop() {
  clearInterval(playing);
  playing = 0;
  if ($("play")) $("play").textContent = "play";
}
on("play", "click", () => {
  if (playing) return stop();
  const last = data.flow.steps.length - 1, calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (state.step === last) state.step = 0;
  $("play").textContent = "stop";
  playing = setInterval(() => {
    state.step = Math.min(last, state.step + 1);
    $("step").value = state.step;
    if (state.step === last) stop();
    render();
  }, calm ? 1000 : clamp(8000 / last, 60, 400));
  return render();
});

if (calls.length) listHeads();
dark.addEventListener("change", render);
new ResizeObserver(render).observe(document.body);
render();
