"""Consensus in chunks, or by compiled code, is the reference: its values, gradients, and rules."""

import os

import pytest
import torch
from cases_ops import FAST, GRAPHS, Largest

import graphattn as ga
from graphattn.graphs.structures.structure import Band
from graphattn.kernels.cpu import library
from graphattn.ops.consensus import pieces
from graphattn.ops.consensus.native import sums as native
from graphattn.ops.consensus.structured import sums as structured

CASES = min(int(os.environ.get("GRAPHATTN_SWEEP", "200")), 2000)
NETWORK = ("alpha", "alpha_bias", "beta", "beta_bias", "shear", "shear_bias")


def random_case(seed: int, dtype: torch.dtype = torch.float64, offset: float = 0.0):
    """A graph, named tensors and options, all drawn from one seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    graph = random_graph(draw) if draw(True, False) else GRAPHS[draw(*GRAPHS)]()
    N, M = graph.num_targets, graph.num_sources
    batch, heads = draw((), (2,), (2, 1), (0,), (3,)), draw(1, 2, 3)
    networks, trunks = draw(1, heads), draw(1, 3)
    rank, features, xi = draw(1, 2, 4), draw(1, 3, 8), draw(1, 5)
    tensors = {
        "state": random(*batch, N, heads, features) + offset,
        "neighbor_state": random(*batch, M, heads, features) + offset,
        "target_hidden": random(*batch, N, networks, trunks * xi),
        "source_hidden": random(*batch, M, networks, trunks * xi),
        "alpha": random(heads, xi),
        "alpha_bias": random(heads),
        "beta": random(heads, xi),
        "beta_bias": random(heads),
        "shear": random(heads, rank, features, xi),
        # (Of rows that are one GELU times a weight alone, rounding would decide 1 / |row|.)
        "shear_bias": random(heads, rank, features) * max(draw(0, 1), xi == 1),
    }
    if N == M and draw(True, False):
        del tensors["neighbor_state"]
    if draw(False, True):
        tensors["u"] = random(*batch, N, heads, features) + offset
        tensors["v"] = random(*batch, M, heads, features) + offset
    step = draw("auto", "float", (), (heads,), (N, heads), (*batch, N, heads))
    if isinstance(step, tuple):
        tensors["step_size"] = 0.1 * random(*step)
    energy = N == M and not graph.has_causal_part and draw(True, False)
    options = {"update": "energy" if energy else "target"}
    if isinstance(step, str):
        options["step_size"] = "auto" if step == "auto" else 0.1
    if draw(False, True):
        shapes = draw(((N,), (M,)), ((*batch, N), (*batch, M)))
        options["valid"] = tuple(torch.rand(s, generator=generator) < 0.8 for s in shapes)
        if draw(True, False):
            options["valid"] = draw((None, options["valid"][1]), (options["valid"][0], None))
    if draw(False, True):  # features of edges, with what applies them or applied
        of_features, E = draw((), batch), graph.num_edges
        if draw(True, False):
            count = draw(1, 4)
            tensors["features"] = random(*of_features, E, 1, count)
            tensors["feature_weight"] = random(networks, trunks * xi, count)
        else:
            tensors["features"] = random(*of_features, E, networks, trunks * xi)
    return graph, tensors, options


def random_graph(draw) -> ga.TokenGraph:
    """A window, or a batch of equal ones, of any lengths."""
    window, loops = draw(1, 2, 3, 8), draw(True, False)
    dilation = draw(2, 5)
    build = draw(
        lambda n: ga.window_path_graph(n, window, self_loops=loops),
        lambda n: ga.causal_window_graph(n, window),
        lambda n: ga.dilated_window_graph(n, window, dilation, self_loops=loops),
        lambda n: ga.bipartite_window_graph(n, window),
        lambda n: ga.causal_graph(n),
    )
    lengths = draw((9,), (40,), (1,), (0,), (5, 17, 1, 2, 1), (30, 30), (1, 1, 0, 1))
    parts = [build(n) for n in lengths]
    return parts[0] if len(parts) == 1 else ga.batch(parts)


def step(backend, graph, tensors, options):
    """One consensus step from tensors by name."""
    options = {"step_size": tensors.get("step_size"), **options}
    if "u" in tensors:
        options["disagreement"] = tensors["u"], tensors["v"]
    if "features" in tensors:
        options["edge_hidden"] = tensors["features"]
    if "feature_weight" in tensors:
        options["edge_hidden"] = ga.FirstLayer(tensors["features"], tensors["feature_weight"])
    return ga.consensus_update(
        tensors["state"],
        tensors.get("neighbor_state", tensors["state"]),
        tensors["target_hidden"],
        tensors["source_hidden"],
        ga.EdgeNetworkParameters(*(tensors[name] for name in NETWORK)),
        graph,
        backend=backend,
        **options,
    )


def run(backend, graph, tensors, options):
    """The new state and the gradients of all tensors, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    new = step(backend, graph, leaves, options)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(new.shape, generator=generator, dtype=torch.float64).to(new.dtype)
    gradients = torch.autograd.grad((new * weight).sum(), list(leaves.values()), allow_unused=True)
    return {"new": new, **dict(zip(leaves, gradients, strict=True))}


@pytest.fixture(params=FAST)
def backend(request):
    return request.param


@pytest.fixture
def short_chunks(monkeypatch):
    """A few edges a chunk: most cases then have several, in every direction."""
    monkeypatch.setattr(structured, "CHUNK", 200)
    monkeypatch.setattr(native, "EDGES_OF_ROUND", 70)
    monkeypatch.setattr(pieces, "SHORTEST", 0)


def assert_same(mine, theirs, seed, **tolerances):
    for name, value in theirs.items():
        if value is None:
            assert mine[name] is None or not mine[name].any(), (seed, name)
        else:
            message = f"{name}, seed {seed}"
            torch.testing.assert_close(mine[name], value, msg=message, **tolerances)


@pytest.mark.long
@pytest.mark.parametrize("chunk", [200, 1 << 20])
@pytest.mark.parametrize("shortest", [0, 512])  # of the sequences gone over hop by hop
def test_values_and_gradients_are_those_of_the_reference(backend, monkeypatch, chunk, shortest):
    monkeypatch.setattr(structured, "CHUNK", chunk)
    monkeypatch.setattr(pieces, "SHORTEST", shortest)
    monkeypatch.setattr(native, "EDGES_OF_ROUND", 33 if chunk == 200 else 0)
    for seed in range(CASES):
        case = random_case(seed)
        mine, theirs = run(backend, *case), run("reference", *case)
        assert_same(mine, theirs, seed, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("short_chunks")
def test_float32_keeps_its_accuracy_under_a_common_offset(backend):
    for seed in range(max(20, CASES // 10)):
        graph, tensors, options = random_case(seed, torch.float32, offset=100.0)
        exact = run("reference", graph, {name: x.double() for name, x in tensors.items()}, options)
        plain = run("reference", graph, tensors, options)
        for name, mine in run(backend, graph, tensors, options).items():
            if mine is None or not mine.numel():
                continue
            scale = exact[name].norm().clamp_min(1e-3)
            error = (mine.double() - exact[name]).norm() / scale
            reference_error = (plain[name].double() - exact[name]).norm() / scale
            assert error <= 2 * reference_error + 1e-5, (seed, name)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_rows_of_lambda_whose_squares_leave_float32_are_normalised_all_the_same(backend, scale):
    """R depends on the directions of its rows only; one head is scaled, the other is not."""
    graph, tensors, options = case_of(ga.window_path_graph(12, 2), heads=2)
    tensors = {name: x.float() for name, x in tensors.items()}
    plain = run(backend, graph, tensors, options)
    scales = torch.tensor([1.0, scale])
    for name in ("shear", "shear_bias"):
        tensors[name] = tensors[name] * scales.view(2, *[1] * (tensors[name].dim() - 1))
    scaled = run(backend, graph, tensors, options)
    torch.testing.assert_close(scaled["new"], plain["new"])
    torch.testing.assert_close(scaled["target_hidden"], plain["target_hidden"])
    assert torch.equal(scaled["new"][:, 0], plain["new"][:, 0])
    torch.testing.assert_close(scaled["shear"][1] * scale, plain["shear"][1])


def case_of(graph, heads=2, features=3, xi=4, batch=(), update=None, **options):
    """Normal random tensors over a graph, the states compared with themselves."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    N = graph.num_targets
    tensors = {
        "state": random(*batch, N, heads, features),
        "target_hidden": random(*batch, N, heads, xi),
        "source_hidden": random(*batch, N, heads, xi),
        "alpha": random(heads, xi),
        "alpha_bias": random(heads),
        "beta": random(heads, xi),
        "beta_bias": random(heads),
        "shear": random(heads, 2, features, xi),
        "shear_bias": random(heads, 2, features),
    }
    update = update or ("target" if graph.has_causal_part else "energy")
    return graph, tensors, {"step_size": 0.1, "update": update, **options}


TOKENS = ("state", "target_hidden", "source_hidden")
EVERY_KIND = [
    ga.batch([ga.window_path_graph(n, 3) for n in (20, 3, 18)]),
    ga.batch([ga.causal_window_graph(n, 4) for n in (20, 3, 18)]),
    ga.batch([ga.window_cycle_graph(20, 2), ga.complete_graph(3), ga.window_path_graph(18, 1)]),
]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("step_size", [0.1, "auto"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("graph", EVERY_KIND, ids=["windows", "causal", "mixed"])
def test_a_bad_sequence_changes_no_bit_of_the_others(backend, graph, bad, step_size):
    """Tokens 20, 21, 22 are a sequence of a batch; the values and gradients of the others stay."""
    _, tensors, options = case_of(graph, batch=(2,), step_size=step_size)
    clean = run(backend, graph, tensors, options)
    for name in TOKENS:
        tensors[name][:, 20:23] = bad
    dirty = run(backend, graph, tensors, options)
    others = (torch.arange(41) < 20) | (torch.arange(41) >= 23)
    assert dirty["new"][:, ~others].isnan().any()
    for name in ("new", *TOKENS):
        assert torch.equal(clean[name][:, others], dirty[name][:, others])


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("listed", [False, True])
def test_a_bad_token_changes_only_its_neighbours(backend, listed):
    graph = ga.causal_window_graph(40, 4)
    if listed:
        graph = ga.from_edge_index(graph.edge_index, 40)
    _, tensors, options = case_of(graph, update="target")
    clean = run(backend, graph, tensors, options)
    for name in TOKENS:
        tensors[name][20] = torch.nan
    dirty = run(backend, graph, tensors, options)
    changed = (clean["new"] != dirty["new"]).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [20, 21, 22, 23]
    for name in TOKENS:  # token 17 is seen by token 20, token 23 sees it
        bad = (clean[name] != dirty[name]).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(bad) <= set(range(17, 24)), name


@pytest.mark.parametrize("graph", EVERY_KIND, ids=["windows", "causal", "mixed"])
def test_a_batch_gives_what_each_sequence_gives_alone(backend, graph):
    _, tensors, options = case_of(graph, step_size="auto")
    together = run(backend, graph, tensors, options)
    for part, start in zip(graph.structure.parts, (0, 20, 23), strict=True):
        here = slice(start, start + part.num_targets)
        alone_graph = ga.from_edge_index(part.edges(), part.num_targets)
        pieces = {name: x[here] if name in TOKENS else x for name, x in tensors.items()}
        alone = step(backend, alone_graph, pieces, options)
        torch.testing.assert_close(together["new"][here], alone)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("step_size", [0.1, "auto"])
@pytest.mark.parametrize("banded", [True, False])
def test_it_can_be_differentiated_twice(backend, update, step_size, banded):
    window = ga.window_path_graph(4, 2, self_loops=True)
    graph = ga.batch([window, window if banded else ga.complete_graph(2)])
    _, tensors, options = case_of(graph, features=2, xi=2, step_size=step_size, update=update)
    options["valid"] = torch.arange(graph.num_targets) != 1
    names = list(tensors)

    def function(*values):
        return step(backend, graph, dict(zip(names, values, strict=True)), options)

    inputs = [x.requires_grad_() for x in tensors.values()]
    torch.autograd.gradcheck(function, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def second_derivatives(backend, graph, tensors, options):
    """Differentiate the sum of all squared gradients with respect to all tensors."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    tied = {**leaves, "u": 2 * leaves["state"], "beta": leaves["alpha"]}
    new = step(backend, graph, {**tied, "v": tied["u"]}, options)
    of = [leaf for name, leaf in leaves.items() if name != "beta"]
    gradients = torch.autograd.grad(new.pow(3).sum(), of, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in gradients), of)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("step_size", [0.1, "auto"])
@pytest.mark.parametrize("num_tokens", [9, 1, 0])
def test_a_tensor_in_several_places_has_the_second_derivatives_of_the_reference(
    backend, num_tokens, step_size
):
    """u is v and alpha is beta; and every derivative is there even where there is no edge."""
    case = case_of(ga.window_path_graph(num_tokens, 2), step_size=step_size)
    mine, theirs = (second_derivatives(name, *case) for name in (backend, "reference"))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("which", TOKENS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("graph", EVERY_KIND, ids=["windows", "causal", "mixed"])
def test_what_an_invalid_token_holds_reaches_nothing(backend, graph, bad, which):
    """NaN or infinity in an invalid token reaches no value, no gradient and no second derivative.

    Gradients of the network are among them.
    """
    valid = torch.arange(41) % 5 != 2
    _, tensors, options = case_of(graph, step_size="auto", valid=valid)
    clean, clean_twice = (f(backend, graph, tensors, options) for f in (run, twice))
    tensors[which] = tensors[which].masked_fill(~valid[:, None, None], bad)
    dirty, dirty_twice = (f(backend, graph, tensors, options) for f in (run, twice))
    for name, value in clean.items():
        kept = valid if name in ("new", "state") else slice(None)  # an invalid token keeps its own
        assert torch.equal(value[kept], dirty[name][kept]), name
    for value, same in zip(clean_twice, dirty_twice, strict=True):
        assert torch.equal(value, same)


def twice(backend, graph, tensors, options):
    """Gradients of the network's squared gradients, tokens and network alike."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    new = step(backend, graph, leaves, options)[options["valid"]]
    network = [leaves[name] for name in NETWORK]
    gradients = torch.autograd.grad(new.square().sum(), network, create_graph=True)
    wanted = [leaf for name, leaf in leaves.items() if name != "state"]
    return torch.autograd.grad(sum(x.square().sum() for x in gradients), wanted)


def test_gradients_that_nobody_wants_are_not_computed(backend):
    graph, tensors, options = case_of(ga.window_path_graph(9, 2), step_size="auto")
    everything = run(backend, graph, tensors, options)
    for wanted in (("state",), ("source_hidden",), ("alpha_bias", "shear"), ("beta",)):
        leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in tensors.items()}
        new = step(backend, graph, leaves, options)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(new.shape, generator=generator, dtype=torch.float64)
        (new * weight).sum().backward()
        for name, leaf in leaves.items():
            if name in wanted:
                torch.testing.assert_close(leaf.grad, everything[name])
            else:
                assert leaf.grad is None


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("step_size", [0.1, "auto"])
def test_no_tensor_is_larger_than_a_chunk_or_an_input(monkeypatch, listed, step_size):
    monkeypatch.setattr(structured, "CHUNK", 1 << 12)
    graph = ga.window_path_graph(600, 8)  # 9,528 edges
    if listed:
        graph = ga.from_edge_index(graph.edge_index, 600)
    _, tensors, options = case_of(graph, xi=16, step_size=step_size)
    inputs = 600 * 2 * 16
    edges = graph.edge_index.numel() if listed else 0
    largest = Largest()
    with largest:
        run("structured", graph, tensors, options)
    assert largest.numel <= max(inputs, edges, 1 << 12)
    with largest:
        run("reference", graph, tensors, options)
    assert largest.numel > 10 * inputs  # what is measured does show the tensors of the edges


def test_the_edges_of_long_windows_are_never_listed(backend, monkeypatch):
    def listed(*_):
        raise AssertionError("the edges were listed")

    monkeypatch.setattr(Band, "edges", listed)
    valid = torch.rand(650) < 0.9
    for build, update in ((ga.window_path_graph, "energy"), (ga.causal_window_graph, "target")):
        graph = ga.batch([build(n, 5) for n in (600, 50)])
        run(backend, *case_of(graph, step_size="auto", update=update, valid=valid))
        layer = ga.nn.SelfConsensus(8, 2, edge_hidden=4, update=update, rope=True)
        layer(torch.randn(2, 650, 8), graph, valid=valid).sum().backward()


@pytest.mark.parametrize("name", GRAPHS)
def test_auto_takes_it_on_every_graph(monkeypatch, name):
    used = []
    module = native if FAST[-1] == "native" else structured
    original = module.sums_over_edges

    def spy(*arguments, **options):
        used.append(True)
        return original(*arguments, **options)

    monkeypatch.setattr(module, "sums_over_edges", spy)
    graph = GRAPHS[name]()
    if graph.num_targets != graph.num_sources:
        graph = ga.from_mask(graph.to_mask()[:, : graph.num_targets])
    _, tensors, options = case_of(graph, update="target")
    support = ga.backends("consensus_update", graph, tensors["state"])
    assert all(support[name] is None for name in FAST)
    step("auto", graph, tensors, options)
    assert used
    used.clear()
    with ga.use_backend("reference"):
        step("auto", graph, tensors, options)
    torch.func.vmap(lambda u: step("auto", graph, {**tensors, "state": u}, options))(
        tensors["state"].expand(2, *tensors["state"].shape)
    )
    assert not used  # torch.func looks into the steps


@pytest.mark.parametrize("backend", ["reference", "structured", "native"])
def test_first_layers_under_autocast_are_linear_layers(backend):
    """First layers under autocast take their products in its dtype, as nn.Linear does.

    Nothing else is computed in that dtype.
    """
    if backend == "native" and library.why_not() is not None:
        pytest.skip(str(library.why_not()))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(9, 1, 8, generator=generator)
    weight, bias = (torch.randn(s, generator=generator) for s in ((1, 5, 8), (1, 5)))
    state = torch.randn(9, 1, 4, generator=generator)
    network = ga.EdgeNetworkParameters(
        *(
            torch.randn(s, generator=generator)
            for s in ((1, 5), (1,), (1, 5), (1,), (1, 2, 4, 5), (1, 2, 4))
        )
    )
    graph = ga.window_path_graph(9, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.nn.functional.linear(tokens, weight[0]) + bias.bfloat16()
        first = ga.FirstLayer(tokens, weight, bias)
        both = [
            ga.consensus_update(state, state, x, x, network, graph, 0.1, backend=backend)
            for x in (first, hidden.float())
        ]
    assert both[0].dtype == torch.float32
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)
