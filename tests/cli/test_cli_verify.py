"""`graphattn verify` passes on the library, and fails on every part of it that is made wrong."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cli_helpers import call, done, refused

import graphattn as ga
from graphattn.cli import verify
from graphattn.cli.verify import claims, errata, matrix_weights, windows
from graphattn.cli.verify.claims import Claim, Erratum, Exhibit, MeasuredCase, Size
from graphattn.cli.verify.graphs import random_digraph

TINY = Size(every=9, paths=((300, 1), (250, 40)), draws=3)
MORE = Size(every=40, paths=((300, 1), (250, 40), (5000, 3)), draws=10)
BY_NAME = {claim.name: claim for claim in verify.CLAIMS}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(claims.SIZES, "small", TINY)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_claim_holds(name):
    outcome = BY_NAME[name].run(MORE)
    assert outcome.holds, (outcome.error, outcome.failures[:3])
    assert len(outcome.cases) >= 2


@pytest.mark.parametrize("name", ["no oscillation", "low-pass"])
def test_claims_about_a_layer_hold_with_isometric_positions_too(name):
    claim = BY_NAME[f"SelfConsensus auto: {name}"]
    layers = partial(matrix_weights.random_layers, rope="isometric")
    outcome = replace(claim, cases=layers).run(MORE)
    assert outcome.holds, (outcome.error, outcome.failures[:3])


@pytest.mark.parametrize("erratum", verify.ERRATA, ids=lambda erratum: erratum.printed)
def test_every_erratum_is_shown_and_its_correction_holds(erratum):
    shown = erratum.run()
    assert shown.holds, shown


def test_the_command_ends_with_0_and_writes_everything_down(tmp_path):
    result = done("verify", "--json", tmp_path / "v.json")
    assert result.output.splitlines()[-1] == str(tmp_path / "v.json")
    assert "FAILED" not in result.output
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert record["passed"]
    assert [claim["name"] for claim in record["claims"]] == list(BY_NAME)
    assert all(claim["holds"] and claim["cases"] >= 2 for claim in record["claims"])
    assert all(
        claim["tightest"]["margin"] >= -claim["tightest"]["slack"] for claim in record["claims"]
    )
    assert len(record["errata"]) == len(verify.ERRATA)
    assert all(erratum["shown"] and erratum["exhibit"]["numbers"] for erratum in record["errata"])
    for claim in record["claims"]:
        assert claim["statement"]
        assert claim["source"]


@pytest.mark.long
def test_the_report_has_both_tables_and_figures_that_a_phone_can_show(tmp_path, on_a_phone):
    done("verify", "--html", tmp_path / "v.html")
    html = (tmp_path / "v.html").read_text(encoding="utf-8")
    assert html.count("data:image/png") == len(on_a_phone) == 3
    assert on_a_phone.smallest_label() >= 9
    assert html.count("<table>") == 2
    assert html.count("holds") >= len(BY_NAME)
    for words in ("Remark 4.2", "Eq. 42", "1.397"):
        assert words in html


def changed(by):
    """Wraps a function of ga.spectral: what it returns is changed."""

    def make(original):
        return lambda *arguments, **keywords: by(original(*arguments, **keywords))

    return make


def the_papers(original):
    """The Laplacian by out-degrees, symmetrised late."""

    def laplacian(graph, weight=None):
        ours = original(graph, weight)
        looks = graph.to_scipy(weight).T
        out, into = (np.asarray(looks.sum(axis=axis)).ravel() for axis in (1, 0))
        ours.setdiag(ours.diagonal() + (out - into) / 2)
        return ours

    return laplacian


PATH, LONG_PATH = "path: 2 S ≤ λ₁ ≤ 4 S", "long path: 2 S ≤ λ₁ ≤ 4 S"
SIGNS, FALLS = "below 1 / (2 λ_max): signs stay", "below 1 / λ_max: energy falls"
FLIPS, RISES = "above it: the top mode flips", "above it: energy can rise"
FORM, STEPS = "E(u) = uᵀ L u", "steps to consensus: enough, none idle"
SANDWICH, FIEDLER = "matrix weights: a λ₁ ≤ λ ≤ b λ₁", "matrix weights: the Fiedler value"
CLASSES = "eigenvalue 1: once a closed class"

# What is made wrong, how, and the claims that must notice.
BROKEN = [
    ("path_fiedler_bounds", changed(lambda b: (b[0], 0.999 * b[1])), [PATH, LONG_PATH]),
    ("path_fiedler_bounds", changed(lambda b: (1.9 * b[0], b[1])), [PATH]),
    ("cycle_fiedler_value", changed(lambda v: v * (1 + 1e-6)), ["cycle: λ₁ in closed form"]),
    ("cycle_fiedler_value", changed(lambda v: 1 / v), ["cycle: λ₁ grows with the window"]),
    ("fiedler_value", changed(lambda v: v + 1e-9), ["complete graph: λ₁ = N; apart: 0"]),
    ("fiedler_value", changed(lambda v: 1.02 * v), ["measured rate of convergence = ω₁"]),
    ("fiedler_value", changed(lambda v: 9 * v), ["path: λ₁ of the order w³ / N²"]),
    ("fiedler_value", changed(lambda v: 1.2 * v), ["‖Hⁿ u - mean‖ ≤ ω₁ⁿ ‖u‖"]),
    ("fiedler_pair", changed(lambda p: (1.01 * p[0], *p[1:])), [LONG_PATH]),
    ("max_step_size", changed(lambda eta: 1.001 * eta), [SIGNS, FALLS]),
    ("max_step_size", changed(lambda eta: 0.999 * eta), [FLIPS, RISES]),
    ("energy", changed(lambda e: 1.001 * e), [FORM, "gradient step = I - 2 η L"]),
    ("laplacian", the_papers, [FORM, "L has no negative eigenvalue"]),
    ("smoothing_rate", changed(lambda r: r + 1e-6), ["smoothing rate = ω₁ of the filter"]),
    ("steps_until_consensus", changed(lambda n: n + 1), [STEPS]),
    ("steps_until_consensus", changed(lambda n: n - 1), [STEPS]),
    ("steps_until_consensus", changed(lambda n: n // 3), ["the limit is the mean"]),
    ("matrix_fiedler_bounds", changed(lambda b: (1.01 * b[0], b[1])), [SANDWICH]),
    ("matrix_fiedler_bounds", changed(lambda b: (b[0], 0.99 * b[1])), [SANDWICH]),
    ("matrix_fiedler_value", changed(lambda v: v * (1 + 1e-6)), [FIEDLER]),
    ("eigenvalue_one_multiplicity", changed(lambda m: m + 1), [CLASSES]),
    ("closed_classes", changed(lambda c: c[1:]), ["closed classes: as networkx finds"]),
]


@pytest.mark.parametrize(
    ("name", "make", "noticed"), BROKEN, ids=[f"{n} {one[0]}" for n, one in enumerate(BROKEN)]
)
def test_a_function_made_wrong_is_noticed(monkeypatch, name, make, noticed):
    monkeypatch.setattr(ga.spectral, name, make(getattr(ga.spectral, name)))
    for claim in noticed:
        assert not BY_NAME[claim].run(TINY).holds, claim


@pytest.mark.long
def test_a_broken_bound_makes_the_command_end_with_1_and_say_where(monkeypatch, tmp_path):
    original = ga.spectral.path_fiedler_bounds
    monkeypatch.setattr(
        ga.spectral, "path_fiedler_bounds", lambda N, w: (0.0, original(N, w)[1] * 0.99)
    )
    result = call("verify", "--json", tmp_path / "v.json")
    assert result.exit_code == 1
    assert re.search(r"FAILED path: 2 S ≤ λ₁ ≤ 4 S: \d+ cases, N \d, w 1: -0\.01\b", result.output)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert not record["passed"]
    broken = {claim["name"] for claim in record["claims"] if not claim["holds"]}
    assert broken == {"path: 2 S ≤ λ₁ ≤ 4 S", "long path: 2 S ≤ λ₁ ≤ 4 S"}


def test_a_layer_whose_automatic_step_is_too_long_is_noticed(monkeypatch):
    original = ga.nn.SelfConsensus.forward

    def too_long(layer, x, graph):
        projected = layer.source_proj(x)
        return projected + 20 * (original(layer, x, graph) - projected)

    monkeypatch.setattr(ga.nn.SelfConsensus, "forward", too_long)
    for name in ("no oscillation", "energy falls"):
        assert BY_NAME[f"SelfConsensus auto: {name}"].run(TINY).failures


def test_an_erratum_that_is_no_longer_one_ends_the_command_with_1(monkeypatch):
    gone = Erratum("Eq. 0", "2 + 2 = 5", "4", lambda: Exhibit(0.0, 0.0, {"2 + 2": 4.0}))
    monkeypatch.setattr(verify, "CLAIMS", [BY_NAME["the limit is the mean"]])
    monkeypatch.setattr(verify, "ERRATA", [gone])
    result = call("verify")
    assert result.exit_code == 1
    assert "FAILED Eq. 0" in result.output


def claim_of(cases, kind="inequality"):
    """A claim about cases that are measured already."""
    return Claim("a claim", "here", "", lambda size: cases, lambda case: case[1:], kind)


def test_a_check_that_cannot_finish_has_not_passed(monkeypatch):
    def fails():
        yield MeasuredCase("first", 1.0)
        raise ValueError("no such graph")

    monkeypatch.setattr(verify, "CLAIMS", [claim_of(fails())])
    monkeypatch.setattr(verify, "ERRATA", [Erratum("there", "", "", lambda: 1 / 0)])
    result = call("verify")
    assert result.exit_code == 1
    assert "FAILED a claim: ValueError: no such graph" in result.output
    assert "FAILED there: ZeroDivisionError" in result.output


@pytest.mark.parametrize(
    "cases",
    [
        [],
        [MeasuredCase("a", math.nan, 1.0)],
        [MeasuredCase("a", 1.0), MeasuredCase("b", -1e-9, 1e-10)],
    ],
)
def test_no_case_and_nan_and_what_exceeds_its_slack_fail(cases):
    assert not claim_of(cases).run(TINY).holds
    assert claim_of([MeasuredCase("a", -1e-9, 1e-8)]).run(TINY).holds


@pytest.mark.parametrize(
    ("kind", "cases", "tightest"),
    [
        ("inequality", [("a", 0.5, 0.0), ("b", 0.1, 0.0), ("c", -1e-12, 1e-9)], "c"),
        ("inequality", [("a", 0.5, 0.0), ("b", 0.1, 0.0), ("c", 0.3, 0.0)], "b"),
        ("inequality", [("a", -0.5, 1.0), ("b", -0.1, 0.0)], "b"),
        ("equation", [("a", -1e-9, 1e-3), ("b", -1e-10, 1e-9)], "b"),
    ],
)
def test_the_tightest_case_is_a_failure_where_there_is_one_and_else_the_nearest(
    kind, cases, tightest
):
    outcome = claim_of([MeasuredCase(*case) for case in cases], kind).run(TINY)
    assert outcome.tightest.name == tightest


def test_bad_input_is_one_line_and_exit_code_2():
    for arguments, words in (
        (["--size", "huge"], "size must be one of 'small', 'full', got 'huge'"),
        (
            ["--json", "nowhere/v.json"],
            "--json must be a file in an existing folder, but there is no folder nowhere",
        ),
    ):
        assert refused("verify", *arguments) == f"graphattn: {words}"


# The oracles of the claims, beside other ways.


@pytest.mark.parametrize("N", [3, 4, 9, 10])
def test_spectra_by_symmetry_are_spectra(N):
    for build, spectrum in (
        (ga.window_cycle_graph, windows.circulant_spectrum),
        (ga.window_path_graph, windows.mirror_spectrum),
    ):
        L = windows.laplacians(build, N)
        np.testing.assert_allclose(spectrum(L), np.linalg.eigvalsh(L), atol=1e-13)
    lopsided = np.diag(np.arange(float(N)))
    for spectrum in (windows.circulant_spectrum, windows.mirror_spectrum):
        with pytest.raises(ArithmeticError):
            spectrum(lopsided)


def test_every_window_below_half_is_tried_once():
    every = {f"N {N}, w {w}" for N in range(1, 10) for w in range(1, 10) if w < N / 2}
    for name in ("cycle: λ₁ in closed form", PATH):
        names = [case.name for case in BY_NAME[name].run(TINY).cases]
        assert len(names) == len(set(names))
        assert set(names) == every


def test_the_block_laplacian_is_the_hessian_of_the_energy():
    graph, _ = random_digraph(3)
    R = matrix_weights.random_matrices(graph, 3)
    C = R.shape[-1]

    def energy(flat):
        u = flat.view(-1, C)
        gap = u[graph.edge_index[1]] - u[graph.edge_index[0]]
        return 0.5 * torch.einsum("ec,ecd,ed->", gap, R, gap)

    start = torch.zeros(graph.num_tokens * C, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(energy, start)
    expected = matrix_weights.block_laplacian(graph, R)
    np.testing.assert_allclose(hessian.numpy() / 2, expected, atol=1e-12)


def test_exhibits_have_the_numbers_that_can_be_worked_out_by_hand():
    numbers = errata.energy_by_out_degrees.show().numbers
    assert list(numbers.values()) == pytest.approx([1.5, 0.0, 1.5])
    shown = errata.semidefinite_by_out_degrees.show()
    assert shown.violation == pytest.approx((math.sqrt(12) - 3) / 2)
    assert errata.rope_amplifies.show().numbers["Eq. 42"] == pytest.approx(1.397, abs=5e-4)
    star = errata.one_direction_on_a_star.show().numbers
    assert list(star.values()) == pytest.approx([1 / 9, 0.25, -1.25, 1 / 16, 1 - 9 / 16])
    assert errata.limit_of_equation_12.show().numbers["limit_0"] == pytest.approx(3.5)
