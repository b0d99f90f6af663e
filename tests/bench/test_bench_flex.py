"""FlexAttention in `graphattn bench`: its masks are the graphs', and on a CPU it runs forward."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from bench_helpers import CPU, NEEDS_COMPILER, error_of, measured, quick_runs

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases import inputs
from graphattn.bench.contenders import flex
from graphattn.bench.measuring import correctness as gate
from graphattn.bench.reporting import record

pytest.importorskip("torch.nn.attention.flex_attention")
CASES = {case.name: case for case in cases.CASES}
SIZES = {  # 300 tokens make three blocks of 128
    **{n: {"tokens": 300} for n in ("complete", "gka", "causal-window", "window", "longformer")},
    "grid": {"tokens": 1 + 17**2},
    "crossover": {"tokens": 300, "degree": 10},
}


def inputs_of(name: str, **size: int) -> inputs.AttentionInputs:
    sizes = {**CASES[name].sizes["small"], "features": 16, **SIZES[name], **size}
    return CASES[name].make(sizes, CPU, torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("score", ["flex_rbf", "flex_dot"])
def test_flex_attention_with_the_mask_of_the_graph_is_the_same_attention(
    name, score, flex_on_a_cpu
):
    x = inputs_of(name)
    assert error_of(getattr(flex, score), x, is_dot=score == "flex_dot") < 1e-5
    mask = x.prepared.get("block_mask")
    assert (mask is None) == (name in ("complete", "gka"))  # all pairs need none
    assert flex.block_mask(x) is mask  # listed once


@pytest.mark.parametrize("name", [name for name in SIZES if name not in ("complete", "gka")])
def test_the_blocks_that_hold_edges_are_those_that_all_pairs_give(name, monkeypatch):
    """Blocks that are listed from the edges are those that a look at every pair gives.

    The edges are used on a CPU; torch's own way looks at every pair.
    """
    monkeypatch.setattr(flex, "compile_once", lambda function: function)
    monkeypatch.setattr(flex, "block_size", lambda x: 128)
    x = inputs_of(name)
    mask = flex.block_mask(x)
    expected = flex.list_blocks(mask.mask_mod, None, None, x)
    assert torch.equal(mask.to_dense(), expected.to_dense())
    assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert mask.seq_lengths == expected.seq_lengths


@pytest.mark.long
def test_a_long_window_has_its_blocks_listed_without_a_look_at_all_pairs():
    """65,536 tokens have four thousand million."""
    x = inputs_of("window", tokens=65536, window=17, heads=1, features=1)
    mask = flex.block_mask(x)
    blocks = 65536 // mask.BLOCK_SIZE[0]
    assert int(mask.kv_num_blocks.sum()) == 3 * blocks - 2  # its own block, and both next to it


@pytest.mark.long
@NEEDS_COMPILER
@pytest.mark.parametrize("score", ["flex_rbf", "flex_dot"])
def test_on_a_cpu_the_compiled_forward_pass_is_right(score):
    x = inputs_of("causal-window")
    truth = gate.truth_of(x, backward=True, dot_product=score == "flex_dot")
    assert truth.forward_error_of(getattr(flex, score)) < 1e-5


@pytest.mark.long
@NEEDS_COMPILER
def test_on_a_cpu_the_compiled_forward_pass_over_what_was_chosen_before_is_right():
    x = inputs.attention_inputs(ga.causal_window_graph(100, 20), 2, 16, CPU, torch.float32, 7)
    truth = gate.truth_of(x, backward=False)
    assert truth.forward_error_of(flex.flex_kept) < 1e-5


@pytest.mark.long
def test_on_a_cpu_there_is_no_backward_pass():
    x = inputs_of("window")
    for peer in (flex.flex_dot, flex.flex_rbf):
        with pytest.raises(inputs.ForwardOnlyError, match="no backward pass on a CPU"):
            peer(x)


def test_without_a_compiler_it_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with torch.no_grad(), pytest.raises(inputs.MissingError, match="needs a C\\+\\+ compiler"):
        flex.flex_dot(inputs_of("window"))


# A contender that has a forward pass only.


def run_window(monkeypatch, tmp_path, stand_in) -> tuple[record.Record, str]:
    """A run of one case with graphattn and, in place of FlexAttention, a stand-in."""
    case = replace(CASES["window"], dot_products={}, targets=())
    contenders = {record.OURS: case.contenders[record.OURS], "FlexAttention": stand_in}
    size = {"tokens": 40, "window": 5, "heads": 2, "features": 4}
    quick_runs(monkeypatch, replace(case, contenders=contenders, sizes={"small": size}))
    return measured(tmp_path, "window")


def forward_only(factor: float):
    def run(x):
        if torch.is_grad_enabled():
            raise inputs.ForwardOnlyError("FlexAttention has no backward pass on a CPU")
        return factor * ga.rbf_attention(x.query, x.key, x.value, x.graph, x.sigma)

    return run


def test_it_stands_in_the_forward_rows_and_is_missing_in_the_others(monkeypatch, tmp_path):
    results, output = run_window(monkeypatch, tmp_path, forward_only(1.0))
    rows = {(row.contender, row.passes) for row in results.rows}
    both = {(record.OURS, "forward"), (record.OURS, "forward + backward")}
    assert rows == {("FlexAttention", "forward"), *both}
    (line,) = results.missing
    assert line == (
        "window, FlexAttention, forward + backward: FlexAttention has no backward pass on a CPU"
    )
    assert line in " ".join(output.split())


def test_its_forward_pass_is_checked_like_any_other(monkeypatch, tmp_path):
    results, _ = run_window(monkeypatch, tmp_path, forward_only(1.001))
    assert {row.contender for row in results.rows} == {record.OURS}
    assert results.missing[0].startswith("window, FlexAttention: not timed: wrong result")
