"""examples/pretrained_models.py with random weights: what it loads, splits, measures and writes."""

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install 'graphattn[transformers]'")

ROOT = Path(__file__).resolve().parents[2]
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RESIDUES]
NAMES = ("models", "weights", "data", "figure")


@pytest.fixture(scope="module")
def example():
    """The modules of the example by their last name."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return SimpleNamespace(
            **{name: importlib.import_module(f"pretrained_{name}") for name in NAMES}
        )
    finally:
        sys.path.remove(str(ROOT / "examples"))


def tiny_config(**options):
    return transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=160,
        attn_implementation="eager",
        **options,
    )


@pytest.fixture
def reader(example):
    """A random model of AntiBERTy's kind, sharp enough for attention to matter."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(tiny_config(initializer_range=0.5)).eval()
    return example.weights.AntibodyModel(model, example.weights.tokenizer_of(VOCABULARY))


@pytest.fixture
def encoder(example, reader):
    torch.manual_seed(1)
    model = transformers.BertModel(tiny_config(initializer_range=0.5)).eval()
    return example.weights.SentenceModel(model, reader.tokenizer, 50)


# Loading.


def package_of(reader, folder: Path, **changes) -> None:
    """A package laid out as antiberty 0.1.3, which cannot be imported, around a model's weights."""
    weights = folder / "antiberty" / "trained_models" / "AntiBERTy_md_smooth"
    weights.mkdir(parents=True)
    (folder / "antiberty" / "__init__.py").write_text("raise RuntimeError('was imported')")
    (weights.parent / "vocab.txt").write_text("\n".join(VOCABULARY))
    (weights / "config.json").write_text(json.dumps(reader.model.config.to_dict()))
    state = {k: v.clone() for k, v in reader.model.state_dict().items()}
    for name, size in {"species": 6, "chain": 2, "graft": 2}.items():
        state |= {f"cls.{name}.weight": torch.ones(size, 16), f"cls.{name}.bias": torch.ones(size)}
    state["bert.pooler.dense.weight"], state["bert.pooler.dense.bias"] = (
        torch.ones(16, 16),
        torch.ones(16),
    )
    state["bert.embeddings.position_ids"] = torch.arange(160)[None]
    state |= changes
    torch.save({k: v for k, v in state.items() if v is not None}, weights / "pytorch_model.bin")


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Packages in this folder are found before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_weights_are_read_from_the_package_without_importing_it(example, reader, installed):
    package_of(reader, installed)
    loaded = example.weights.load_antiberty()
    assert not loaded.model.training
    for name, weight in reader.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    assert loaded.tokenizer("E V")["input_ids"] == [2, 8, 22, 3]


def test_a_version_without_weights_is_refused_by_the_one_that_has_them(example, reader, installed):
    package_of(reader, installed)
    next(installed.rglob("pytorch_model.bin")).unlink()
    with pytest.raises(FileNotFoundError, match=r"pip install antiberty==0\.1\.3"):
        example.weights.load_antiberty()


def test_a_missing_package_is_named_with_what_to_install(example):
    with pytest.raises(
        ImportError, match=r"not_there is not installed: install it with pip install not-there==1"
    ):
        example.weights.package_folder("not_there", "not-there==1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cls.more.weight": torch.ones(2)}, r"unexpected weights \['cls.more.weight'\]"),
        (
            {"bert.encoder.layer.1.output.dense.bias": None},
            r"missing weights \['bert.encoder.layer.1.out",
        ),
    ],
    ids=["unexpected", "missing"],
)
def test_weights_that_do_not_fit_are_refused(example, reader, installed, changes, said):
    package_of(reader, installed, **changes)
    with pytest.raises(RuntimeError, match=said):
        example.weights.load_antiberty()


# Data and split.


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's, as it is defined."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        new = [i + 1]
        for j, y in enumerate(b):
            new.append(min(row[j + 1] + 1, new[j] + 1, row[j] + (x != y)))
        row = new
    return row[-1]


def random_sequences(count: int, seed: int) -> list[str]:
    """Random ones of 15 to 30 residues; every second a copy of the one before with few edits."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    results: list[str] = []
    for i in range(count):
        if i % 2:
            letters = list(results[-1])
            letters[below(len(letters))] = RESIDUES[below(20)]
            del letters[below(len(letters))]
        else:
            letters = [RESIDUES[below(20)] for _ in range(15 + below(16))]
        results.append("".join(letters))
    return results


def test_identities_are_those_of_the_edit_distance(example):
    sequences = [*random_sequences(9, 0), "AC"]
    actual = example.data.identities(sequences)
    for i, a in enumerate(sequences):
        for j, b in enumerate(sequences):
            expected = 1 - edit_distance(a, b) / max(len(a), len(b))
            assert actual[i, j] == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_near_duplicate_is_on_both_sides_of_the_split(example, seed):
    heavy, light = random_sequences(40, seed), random_sequences(41, seed + 10)[1:]
    antibodies = [
        example.data.Antibody(str(i), "", *pair)
        for i, pair in enumerate(zip(heavy, light, strict=True))
    ]
    train, test = example.data.split(antibodies, identity=0.9, seed=seed)
    assert sorted([*train, *test]) == sorted(antibodies)
    assert 10 <= len(train) <= 20
    for one in train:
        for other in test:
            for a, b in ((one.heavy, other.heavy), (one.light, other.light)):
                assert 1 - edit_distance(a, b) / max(len(a), len(b)) < 0.9
    alike = sum(
        1 - edit_distance(a, b) / max(len(a), len(b)) >= 0.9
        for a, b in zip(heavy[::2], heavy[1::2], strict=True)
    )
    assert alike > 5  # there was something to keep together


def test_antibodies_are_read_with_both_domains(example, tmp_path):
    pytest.importorskip("biotite", reason="pip install 'graphattn[bio]'")
    file = tmp_path / "a.fasta"
    file.write_text(">x|VH|heavy|PDB 1ABC\nEVQ\n>x|VL|kappa|PDB 1ABC\nDIQ\n")
    assert example.data.read_antibodies(file) == [("x", "PDB 1ABC", "EVQ", "DIQ")]
    for text, said in {
        ">x|VH|heavy|PDB\nEVQ\n": "must contain VH and VL of x, got",
        ">x|VH|h|P\nEVQ\n>x|VH|h|P\nEVQ\n": "must contain VH of x only once",
        ">x heavy\nEVQ\n": "headers of .* must have the form",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            example.data.read_antibodies(file)


def test_the_examples_own_antibodies_are_whole_domains_with_a_source(example):
    assert len({a.name for a in example.data.ANTIBODIES}) == 6
    for antibody in example.data.ANTIBODIES:
        assert antibody.source
        for domain, end in ((antibody.heavy, "VTVS[SA]$"), (antibody.light, "K[LV]EI?L?K$")):
            assert set(domain) <= set(RESIDUES)
            assert 100 <= len(domain) <= 130
            assert re.search(end, domain)  # the framework that closes every variable domain


# Measuring.


def test_a_masked_loss_is_that_of_one_mask_in_one_sequence(example, reader):
    sequences = ["EVQLVESGG", "DIQMTQSPSSLSASV", "QVQ"]
    positions = torch.tensor([[0, 8], [14, 3], [1, 2]])
    actual = example.models.masked_losses(reader, sequences, positions, batch_size=4)
    for s, sequence in enumerate(sequences):
        for p, place in enumerate(positions[s].tolist()):
            tokens = torch.tensor([2, *(VOCABULARY.index(r) for r in sequence), 3])
            truth = int(tokens[place + 1])
            tokens[place + 1] = VOCABULARY.index("[MASK]")
            with torch.no_grad():
                logits = reader.model(tokens[None]).logits[0, place + 1].double()
            expected = float(logits.exp().sum().log() - logits[truth])
            assert float(actual[s, p]) == pytest.approx(expected, abs=1e-5)


def test_the_share_of_edges_is_counted(example):
    swap = example.models.Swap
    n, w, k = 40, 5, 7
    of_window = (n * (2 * w + 1) - w * (w + 1)) / n**2
    assert swap("eager").share_of_edges([n]) == 1
    assert swap("rbf").share_of_edges([n, 3]) == 1
    assert swap("dot", w).share_of_edges([n]) == pytest.approx(of_window)
    assert swap("dot", 99).share_of_edges([n]) == 1
    assert swap("dot", None, k).share_of_edges([n]) == pytest.approx(k / n)
    seen = [min(i, w) + min(n - 1 - i, w) + 1 for i in range(n)]
    expected = sum(min(s, k) for s in seen) / n**2
    assert swap("krause", w, k).share_of_edges([n]) == pytest.approx(expected)
    assert swap("dot", w).share_of_edges([n, 2]) == pytest.approx((of_window + 1) / 2)


def test_errors_are_over_antibodies_and_those_of_ratios_over_differences(example):
    generator = torch.Generator().manual_seed(0)
    hard = torch.rand(50, generator=generator, dtype=torch.float64)
    actual = example.models.compared(hard + 0.1, hard)
    assert actual["perplexity"] == pytest.approx(math.exp(float(hard.mean()) + 0.1))
    expected = float((hard - hard.mean()).square().sum() / 49) ** 0.5 / 50**0.5
    assert actual["error"] == pytest.approx(actual["perplexity"] * expected)
    assert actual["ratio"] == pytest.approx(math.exp(0.1))
    assert actual["ratio_error"] == pytest.approx(0, abs=1e-12)


@pytest.fixture
def plan(example):
    swap = example.models.Swap
    swaps = (
        example.models.EAGER,
        swap("dot", 4),
        swap("dot", None, 4),
        swap("rbf"),
        example.models.KRAUSE,
    )
    tuned = (example.models.EAGER, swap("rbf"), example.models.KRAUSE)
    return example.models.Plan(
        swaps, positions=1, tuned=tuned, steps=3, batch_size=2, learning_rate=0.01
    )


@pytest.mark.long
def test_swaps_are_tuned_on_other_antibodies_than_they_are_measured_on(
    example, reader, plan, monkeypatch, capsys
):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    tuned_on, original = [], {k: v.clone() for k, v in reader.model.state_dict().items()}
    tune = example.models.fine_tune

    def watched(reader, antibodies, *rest):
        tuned_on.append(antibodies)
        tune(reader, antibodies, *rest)

    monkeypatch.setattr(example.models, "fine_tune", watched)
    result = example.models.measure_antibodies(reader, example.data.ANTIBODIES, plan, seed=0)
    rows, facts = result["rows"], result["facts"]
    assert [r["fine_tuned"] for r in rows] == [False] * 5 + [True] * 3
    measured_on = set(facts["names"].split(", "))
    for antibodies in tuned_on:
        assert len(antibodies) == facts["tuned_on"] == 3
        assert not {a.name for a in antibodies} & measured_on
    assert len(measured_on) == facts["measured_on"] == 3
    assert facts["masked_residues"] == 6
    printed = capsys.readouterr().out
    for row in rows:
        assert f"{row['perplexity']:.3f} ± {row['error']:.3f}" in printed
        assert row["perplexity"] == pytest.approx(math.exp(sum(row["losses"]) / 3), rel=1e-3)
    before = {
        r["mixer"]: r["perplexity"] for r in rows if not r["fine_tuned"] and r["mixer"] != "dot"
    }
    after = {r["mixer"]: r["perplexity"] for r in rows if r["fine_tuned"]}
    for mixer in after:  # large steps on a random model: it learns how frequent residues are
        assert after[mixer] < 0.8 * before[mixer], mixer
    assert rows[0]["ratio"] == 1
    for name, weight in reader.model.state_dict().items():
        assert torch.equal(weight, original[name])


def test_embeddings_are_means_over_what_is_not_padding(example, encoder):
    texts = ["E V Q", "D I Q M T Q S P"]
    together = example.models.embed(encoder, texts)
    for text, result in zip(texts, together, strict=True):
        tokens = torch.tensor([[2, *(VOCABULARY.index(r) for r in text.split()), 3]])
        with torch.no_grad():
            mean = encoder.model(tokens).last_hidden_state[0].mean(0)
        torch.testing.assert_close(result, mean / mean.norm(), atol=1e-5, rtol=0)


@pytest.mark.long
def test_the_command_writes_its_record_and_draws_it(
    example, reader, encoder, plan, monkeypatch, tmp_path
):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    pytest.importorskip("matplotlib", reason="pip install 'graphattn[plots]'")
    import typer
    from typer.testing import CliRunner

    monkeypatch.setattr(example.models, "QUICK", plan._replace(tuned=(example.models.KRAUSE,)))
    monkeypatch.setattr(example.models, "load_antiberty", lambda: reader)
    monkeypatch.setattr(example.models, "load_minilm", lambda: encoder)
    app = typer.Typer()
    app.command()(example.models.main)
    files = tmp_path / "run.json", tmp_path / "run.png"
    result = CliRunner().invoke(app, ["--quick", "--json", str(files[0]), "--plot", str(files[1])])
    assert result.exit_code == 0, result.output
    record = json.loads(files[0].read_text(encoding="utf-8"))
    assert record["provenance"]["transformers"] == transformers.__version__
    assert record["provenance"]["seed"] == 0
    assert len(record["antibodies"]["rows"]) == 6
    assert len(record["sentences"]["rows"]) == 5
    assert all(line.count("mixer") <= 1 for line in files[0].read_text("utf-8").splitlines())
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))
