"""Experiments about the papers' claims: their records, their judgements and their oracle."""

import dataclasses
import importlib
import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS, RESULTS = ROOT / "examples" / "papers", ROOT / "docs" / "results"
NAMES = sorted(
    path.stem for path in SCRIPTS.glob("*.py") if "\nEXPERIMENT = " in path.read_text("utf-8")
)


@pytest.fixture(autouse=True)
def _scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def rows_of(losses: dict[str, dict[float, list[float | None]]]) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "lr": lr, "seed": seed, "loss": loss,
         "status": "diverged" if loss is None else "finished"}
        for arm, by_rate in losses.items()
        for lr, own in by_rate.items()
        for seed, loss in enumerate(own)
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_record_has_the_prediction_of_its_script(name: str) -> None:
    experiment = script(name).EXPERIMENT
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    for field in ("name", "paper", "claim", "prediction", "refuted_if"):
        assert record[field] == getattr(experiment, field), field
    assert record["config"] == json.loads(json.dumps(experiment.config))
    assert record["verdict"] in ("open", "held", "not held", "inconclusive", "beyond")
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    has_figure = (RESULTS / f"{name}.svg").is_file()
    assert page == script("evidence").page(record, has_figure)
    assert bool(record["numbers"]) == has_figure


def test_the_index_lists_every_record() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == set(NAMES)
    assert (RESULTS / "index.md").read_text(encoding="utf-8") == script("evidence").index(RESULTS)


def test_every_sentence_about_what_to_use_has_a_number_of_ours() -> None:
    page = (RESULTS / "what-to-use.md").read_text(encoding="utf-8")
    advice = page.split("\n- ")[1:]
    assert len(advice) >= 5
    for sentence in advice:
        links = re.findall(r"\[([^]]+)\]\((\w+)\.md\)", sentence)
        assert links, sentence
        for number, name in links:
            record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
            known = " ".join([record["why"], record["notes"], (RESULTS / f"{name}.md").read_text()])
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", known), (number, name)


SEEDS = {"sa": {1.0: [2.0, 2.1], 10.0: [3.0, 3.2]}, "mix": {1.0: [2.0, 2.0], 10.0: [2.5, 2.5]}}


@pytest.mark.parametrize(
    ("consensus", "other", "verdict"),
    [
        ({1.0: [2.2, 2.2], 10.0: [2.6, 2.6]}, {}, "held"),
        ({1.0: [2.2, 2.2], 10.0: [2.8, 2.8]}, {}, "not held"),  # more than half of 1.05
        ({1.0: [2.2, 2.2], 10.0: [2.3, None]}, {}, "not held"),
        ({1.0: [2.2, 2.2], 10.0: [2.6, 2.6]}, {"mix": {1.0: [2.3, 2.3], 10.0: [2.5, 2.5]}},
         "not held"),  # worse than two deviations at the best rate
        ({1.0: [2.2, 2.2], 10.0: [2.6, 2.6]}, {"mix": {1.0: [2.0, 2.0], 10.0: [3.2, 3.2]}},
         "not held"),  # as steep as attention
        ({1.0: [2.2, 2.2], 10.0: [2.2, 2.2]}, {"sa": {1.0: [2.0, 2.0], 10.0: [2.05, 2.05]}},
         "inconclusive"),
        ({1.0: [2.2, 2.2], 10.0: [2.6]}, {}, "open"),
    ],
)  # fmt: skip
def test_a_sweep_is_judged_as_its_prediction_says(consensus, other, verdict) -> None:
    rows = rows_of({**SEEDS, "sc": consensus, **other})
    found, why = script("sweep_claims").flatter(rows, (1.0, 10.0), 2, 0.1)
    assert found == verdict
    assert why


def test_a_control_that_is_as_flat_refutes() -> None:
    controls = script("consensus_controls")
    steep = {lr: [2.0 + lr] * controls.SEEDS for lr in controls.RATES}
    losses = dict.fromkeys(controls.ARMS, steep)
    losses["sc"] = {lr: [2.0 + lr / 2] * controls.SEEDS for lr in controls.RATES}
    assert controls.judged(rows_of(losses))[0] == "held"
    losses["convolution"] = losses["sc"]
    verdict, why = controls.judged(rows_of(losses))
    assert verdict == "not held"
    assert why.endswith("As flat as SC: convolution.")


def test_the_oracle_sums_over_all_paths() -> None:
    generation = script("consensus_generation")
    model = generation.HiddenMarkov()
    letters = torch.tensor([[0, 5, 3]])
    total = 0.0
    for path in itertools.product(range(generation.STATES), repeat=3):
        p = float(model.start[path[0]])
        for place, state in enumerate(path):
            p *= float(model.emission[state, letters[0, place]])
            if place:
                p *= float(model.transition[path[place - 1], state])
        total += p
    assert float(model.nats(letters)) == pytest.approx(-torch.tensor(total).log().item() / 3)
    # The chain is stationary: its mean surprise is that of long texts it draws.
    assert torch.allclose(model.start @ model.transition, model.start)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([2.0, 2.1, 2.2], [2.1, 2.2, 2.3], "held"),  # apart by 0.1, which is one deviation
        ([2.0, 2.1, 2.2], [2.5, 2.6, 2.7], "not held"),
        ([None] * 3, [None] * 3, "inconclusive"),
        ([2.0, 2.1, 2.2], [None] * 3, "not held"),
    ],
)
def test_two_layers_that_diverge_do_not_differ(ours, theirs, verdict) -> None:
    published = script("consensus_published")
    alike = {lr: [2.0, 2.1, 2.2] for lr in published.RATES}
    paper, code = published.ARMS
    rows = rows_of({paper: {**alike, 0.1: ours}, code: {**alike, 0.1: theirs}})
    found, why = published.judged(rows)
    assert found == verdict
    assert "nan" not in why


def test_divergence_of_all_is_said_without_ratios_of_infinities() -> None:
    last = {1.0: [2.0, 2.1], 10.0: [None, None]}
    rows = rows_of(dict.fromkeys(("sa", "sc", "mix"), last))
    found, why = script("sweep_claims").flatter(rows, (1.0, 10.0), 2, 0.1)
    assert found == "not held"
    assert "nan" not in why
    assert why.endswith("Refuted, because SC diverges, and MIX does not rise less than SA.")


@pytest.mark.parametrize("noise_dim", [None, 4])
def test_a_power_is_found_and_influence_ends_at_the_window(noise_dim) -> None:
    import graphattn as ga

    mixing = script("consensus_mixing")
    assert mixing.power({w: 5.0 * w**3 for w in mixing.WINDOWS}) == pytest.approx(3)
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(
        9, 8, depth=2, heads=2, mixer="consensus", window=3, mixer_options={"edge_hidden": 4},
        noise_dim=noise_dim,
    )  # fmt: skip
    for weights in model.parameters():  # a modulation by noise starts at 0, and would stop all
        torch.nn.init.normal_(weights, std=0.3)
    tokens = torch.randint(9, (2, mixing.TOKENS))
    share = mixing.influence(model.double().eval(), tokens)
    assert float(share.sum()) == pytest.approx(1)
    assert share[7:].sum() == 0  # two blocks of three tokens on each side
    assert (share[:7] > 0).all()


def test_numbers_need_a_prediction_first_and_a_plan_erases_none(tmp_path, capsys) -> None:
    evidence = script("evidence")
    experiment = evidence.Experiment("try_it", "A try", "none", "c", "p", "r", {"lr": 1.0})
    found = evidence.Findings(
        [{"mechanism": "sa", "setting": "lr 1", "mean": 1.25, "spread": None, "seeds": 1}],
        "held", "because", runs=[{"loss": 1.25}], seeds=[0],
        draw=lambda ax: ax.plot([0, 1]),
    )  # fmt: skip
    options = ["--results", str(tmp_path)]
    with pytest.raises(SystemExit, match="write and commit the prediction first"):
        evidence.main(experiment, lambda _: found, options)
    evidence.main(experiment, lambda _: found, [*options, "--plan"])
    other = dataclasses.replace(experiment, prediction="another")
    with pytest.raises(SystemExit, match="prediction of try_it differs from its record"):
        evidence.main(other, lambda _: found, options)
    evidence.main(experiment, lambda _: found, options)
    page = (tmp_path / "try_it.md").read_text(encoding="utf-8")
    assert "**Result: held.** because" in page
    assert "\n| | sa |\n|---|---|\n| lr 1 | 1.25 |\n" in page
    figure = (tmp_path / "try_it.svg").read_bytes()
    evidence.main(experiment, lambda _: found, options)
    assert (tmp_path / "try_it.svg").read_bytes() == figure  # no date, no random names
    with pytest.raises(SystemExit, match="contains numbers, which a plan would erase"):
        evidence.main(experiment, lambda _: found, [*options, "--plan"])
    noted = dataclasses.replace(experiment, notes="Seen afterwards.")
    evidence.main(noted, lambda _: pytest.fail("measured again"), [*options, "--page"])
    changed = (tmp_path / "try_it.md").read_text(encoding="utf-8")
    assert "Seen afterwards." in changed
    assert changed.startswith(page[: page.index("## ")])
    capsys.readouterr()


def test_a_control_learns_and_averages() -> None:
    import graphattn as ga

    controls = script("controls")
    torch.manual_seed(0)
    graph, x = ga.causal_window_graph(6, 3), torch.randn(1, 6, 8, dtype=torch.float64)
    layer = controls.Average(8, heads=2).double()
    value = layer.value_proj(x)
    expected = torch.stack([value[:, max(i - 2, 0) : i + 1].mean(1) for i in range(6)], 1)
    torch.testing.assert_close(layer(x, graph), layer.output_proj(expected))
    convolution = controls.CausalConvolution(8).double()
    moved = x.clone()
    moved[:, 4] += 1
    changed = (convolution(moved, graph) != convolution(x, graph)).any(-1)[0]
    assert changed.tolist() == [False, False, False, False, True, True]
    small = controls.SmallGain(8, heads=2).double()
    plain = ga.nn.DotProductAttention(8, heads=2).double()
    plain.load_state_dict(small.state_dict())
    torch.testing.assert_close(small(x, graph), 0.1 * plain(x, graph))


def test_seeds_give_controls_other_weights() -> None:
    import graphattn as ga

    controls = script("controls")
    model = ga.models.CausalLM(9, 8, depth=2, heads=2, window=3)
    made = [
        controls.with_mixers(model, seed, kind=controls.SmallGain, window=3) for seed in (0, 1, 0)
    ]
    first, second, again = (one.blocks[0].mixer.query_proj.weight for one in made)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert made[0].windows == [3, 3]
    assert isinstance(made[0].blocks[1].mixer, controls.SmallGain)


def test_the_width_of_the_stable_range_follows_the_tolerance() -> None:
    rows = rows_of({"sa": {1e-3: [1.0], 1e-2: [1.05], 1e-1: [1.5]}})
    widths = [script("rates").widths_of(rows, tolerance)[0]["mean"] for tolerance in (0.01, 0.1, 1)]
    assert widths == pytest.approx([0.0, 1.0, 2.0])


@pytest.mark.parametrize(("loss", "verdict"), [(1.95, "held"), (1.995, "not held")])
def test_a_learned_graph_is_better_in_steps_and_in_time(loss: float, verdict: str) -> None:
    learned = script("learned_graphs")
    rows = [
        {"arm": arm, "lr": learned.LR, "seed": seed, "status": "finished", "step": 600,
         "loss": 2.0, "curve": [(300, 3.0), (600, 2.0)]}
        for arm in learned.ARMS for seed in range(learned.SEEDS)
    ]  # fmt: skip
    costs = dict.fromkeys(learned.ARMS, 0.1)
    assert learned.judged(rows, costs)[0] == "not held"
    for row in rows:
        if row["arm"] == "neighbours":
            row |= {"loss": loss, "curve": [(300, 3.0), (600, loss)]}
    assert learned.judged(rows, costs)[0] == verdict
    costs["neighbours"] = 0.2  # in the time of the path it is at 3 nats
    assert learned.judged(rows, costs)[0] == "not held"
    assert learned.judged(rows[1:], costs)[0] == "open"


def test_learned_graphs_stay_in_their_sequence() -> None:
    learned = script("learned_graphs")
    torch.manual_seed(0)
    x = torch.randn(3, 20, 8, dtype=torch.float64)
    for kind, options in (
        (learned.Neighbours, {"window": 1}),
        (learned.ScoredWindow, {"window": 4}),
    ):
        layer = kind(8, heads=2, rope=True, edge_hidden=4, rank=2, k=2, **options).double()
        alone = torch.cat([layer(one[None], None) for one in x])
        torch.testing.assert_close(layer(x, None), alone)


def test_time_loss_and_seeds_decide_about_structures() -> None:
    speed = script("structure_speed")

    def run(arm: str, seed: int, loss: float, seconds: float) -> dict[str, Any]:
        curve = [[0, 0.0, 2.0], [speed.STEPS, seconds, loss]]
        return {"arm": arm, "seed": seed, "loss": loss, "seconds": seconds, "curve": curve}

    def runs(pyg: float, seconds: float, pairs: float) -> list[dict[str, Any]]:
        return [
            one
            for seed in range(speed.SEEDS)
            for one in (
                run("nearest", seed, 1.0, 10.0),
                run("PyG, nearest", seed, pyg, seconds),
                run("all pairs", seed, pairs, 100.0),
            )
        ]

    assert speed.judged(runs(1.01, 15.0, 0.9))[0] == "held"
    assert speed.judged(runs(1.05, 15.0, 0.9))[0] == "not held"  # another loss
    assert speed.judged(runs(1.01, 12.0, 0.9))[0] == "not held"  # too little time saved
    assert speed.judged(runs(1.01, 15.0, -9.0))[0] == "not held"  # 0.9 after 10 seconds
    assert speed.judged(runs(1.01, 15.0, 0.9)[1:])[0] == "open"


def test_a_run_that_has_ended_is_not_repeated(tmp_path: Path) -> None:
    from argparse import Namespace

    evidence, path = script("evidence"), tmp_path / "runs" / "one.json"
    whole, partial = Namespace(partial=False), Namespace(partial=True)
    assert evidence.once(partial, path, lambda: {"loss": 1.0}) is None
    assert evidence.once(whole, path, lambda: {"loss": 1.0}) == {"loss": 1.0}
    for arguments in (whole, partial):
        assert evidence.once(arguments, path, lambda: {"loss": 2.0}) == {"loss": 1.0}
