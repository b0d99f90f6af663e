"""Four processes that train over shards, and what must hold in them.

:func:`case` runs on every rank: two of data parallelism times two of context parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import graphattn as ga

RANKS = 4
N, BATCH, VOCAB = 33, 4, 29
CLOSE = {"rtol": 0.0, "atol": 1e-10}


class Mesh:
    """The mesh of all processes, data parallelism x context parallelism."""

    def __init__(self) -> None:
        self.mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        self.dp = self.mesh["dp"].get_local_rank()

    def shard(self, graph: ga.TokenGraph) -> Any:
        return ga.distributed.shard(graph, self.mesh["cp"])

    def rows(self, *tensors: Tensor) -> list[Tensor]:
        """The sequences of this rank's part of data parallelism."""
        return [x.chunk(2)[self.dp] for x in tensors]


mesh_of_all = functools.cache(Mesh)


def case(group: Any, name: str, **arguments: Any) -> None:
    """Run a case of this file in float64; all ranks make the same models."""
    ranks = mesh_of_all()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        globals()[name](ranks, **arguments)
    finally:
        torch.set_default_dtype(torch.float32)


# What is learned.


def draws(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens_labels_and_mask() -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of very different lengths: some ranks have hardly a token that counts."""
    generator = draws()
    tokens, labels = torch.randint(VOCAB, (2, BATCH, N), generator=generator)
    valid = torch.rand(BATCH, N, generator=generator) > 0.15
    valid[:, -6:] = False
    valid[0, 3:] = False
    return tokens, labels, valid


def encoder(**options: Any) -> ga.models.SequenceEncoder:
    torch.manual_seed(0)
    mixer = [
        ga.nn.KrauseAttention(16, heads=4, top_k=4, rope=True),
        ga.nn.GaussianKernelAttention(16, heads=4),
        "consensus",
        "dot",
    ]
    return ga.models.SequenceEncoder(
        VOCAB, 16, 4, 4, mixer=mixer, edge_hidden=8, mlp_ratio=2.0, **options
    )


def token_losses(
    model: nn.Module, tokens: Tensor, labels: Tensor, graph: Any, valid: Tensor
) -> Any:
    logits = model(tokens, graph, valid=valid)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Steps that see the scale of a gradient, as Adam's do not."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def steps(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Iterator[dict[str, Tensor]]:
    """Take steps of an optimizer, and yield the loss and the parameters after each."""
    optimizer = optimizer_of(model)
    while True:
        value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield {"loss": value.detach(), **whole_parameters(model)}


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters on every rank, whatever holds them."""
    parameters = {}
    for name, parameter in model.named_parameters():
        whole = getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)()
        parameters[name.removeprefix("module.")] = whole.detach().clone()
    return parameters


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            actual[name], x, **CLOSE, msg=lambda said, n=name: f"{n}: {said}"
        )


def with_fsdp(model: Any, mesh: DeviceMesh | None = None) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# Models.


def check_model(ranks: Mesh, model: Any, graphs: Any, tokens: Tensor, **given: Any) -> None:
    """A model over shards returns what it returns over the graphs."""
    model.eval()
    several = isinstance(graphs, list)
    shards = [ranks.shard(graph) for graph in graphs] if several else ranks.shard(graphs)
    first = shards[0] if several else shards
    of_rank = {k: first.split(x, dim=-1) if x.shape[-1] == N else x for k, x in given.items()}
    output = first.gather(model(first.split(tokens), shards, **of_rank))
    torch.testing.assert_close(output, model(tokens, graphs, **given), **CLOSE)


def models_compute_over_shards_what_they_compute_over_graphs(ranks: Mesh) -> None:
    tokens, _, valid = tokens_labels_and_mask()
    window = ga.window_path_graph(N, 4, self_loops=True)
    check_model(ranks, encoder(), window, tokens, valid=valid)
    model = encoder()
    check_model(ranks, model, model.graphs(N), tokens, valid=valid)
    model = ga.models.SequenceEncoder(VOCAB, 16, 2, 4, noise_dim=8, norm="rms")
    nn.init.normal_(model.blocks[0].modulation.weight)
    check_model(ranks, model, window, tokens, noise_level=torch.rand(BATCH, generator=draws()))
    check_model(ranks, model, window, tokens, noise_level=torch.rand(BATCH, N, generator=draws()))
    lm = ga.models.CausalLM(
        VOCAB, 16, 4, 4, mixer="gka-consensus", window=(4, 9), window_pattern="SL", tie_weights=True
    )
    check_model(ranks, lm, lm.graphs(N), tokens, valid=valid)
    check_model(ranks, lm, lm.graphs([20, 13]), tokens, positions=torch.arange(N) * 3)


def proteins_compute_over_shards_what_they_compute_over_graphs(ranks: Mesh) -> None:
    tokens = torch.randint(20, (2, N), generator=draws())
    model = ga.models.ProteinModel(16, depth=2, heads=4)
    check_model(ranks, model, model.graphs(N), tokens)
    check_model(ranks, model, model.graphs(N), tokens, positions=torch.arange(N) * 2)
    plain = ga.models.ProteinModel(
        16, depth=2, heads=4, mixer="mix", mixer_options={"edge_hidden": 8}, structure=False
    )
    check_model(ranks, plain, plain.graphs(N), tokens)
    places = torch.randn(N, 3, generator=draws()).cumsum(0) * 2
    structure = ga.data.Structure("GWKAC" * 6 + "GWK", places)
    graph = ga.union(structure.window_graph(4, self_loops=True), structure.neighbor_graph(8))
    features = structure.edge_features(graph).double()
    shard = ranks.shard(graph)
    model.eval()
    tokens_of_rank, positions = shard.split(tokens, structure.positions)
    actual = model(
        tokens_of_rank, shard, positions=positions, edge_features=shard.split(features, of="edges")
    )
    expected = model(tokens, structure=structure, graph=graph)
    torch.testing.assert_close(shard.gather(actual), expected, rtol=0, atol=1e-6)  # of float32
    shards = [ranks.shard(one) for one in model.graphs(structure=structure)]
    actual = model(shards[0].split(tokens), shards, structure=structure)
    expected = model(tokens, structure=structure)
    torch.testing.assert_close(shard.gather(actual), expected, rtol=0, atol=1e-6)  # of float32
    with pytest.raises(ValueError, match=f"structure must have the {N} residues of all ranks"):
        model(tokens_of_rank, shard, structure=ga.data.Structure("GW", places[:2]))
    codes = torch.randint(-1, 7, (2, N), generator=draws(2))  # -1 is unknown
    model = ga.models.ProteinModel(16, depth=2, heads=4, tracks={"shape": 7})
    graph = model.graphs(N)
    shards = [ranks.shard(one) for one in graph]
    tokens_of_rank, codes_of_rank = shards[0].split(tokens, codes)
    actual = model(tokens_of_rank, shards, tracks={"shape": codes_of_rank})
    for name, expected in model(tokens, graph, tracks={"shape": codes}).items():
        torch.testing.assert_close(shards[0].gather(actual[name]), expected, **CLOSE)


def biases_of_a_shard_are_those_of_its_edges(ranks: Mesh) -> None:
    window = ga.window_path_graph(36, 4, self_loops=True)
    graphs = {
        "window": window,
        "edges": ga.from_edge_index(window.edge_index, 36),
        "grid": ga.grid_window_graph(6, 6, 2),
        "global": ga.longformer_graph(36, window=3, global_tokens=[0]),
        "short": ga.window_path_graph(36, 35, self_loops=True),
        "packed": ga.batch([ga.causal_window_graph(20, 5), ga.causal_window_graph(16, 5)]),
    }
    layer = ga.nn.DotProductAttention(16, 4)
    generator = draws()
    x = torch.randn(2, 36, 16, generator=generator)
    places = torch.randn(36, 3, generator=generator)
    for name, graph in graphs.items():
        shard = ranks.shard(graph)
        most = (2, 2) if name == "grid" else 5
        of_offset, of_distance = ga.nn.OffsetBias(4, most), ga.nn.DistanceBias(4, cutoff=3.0)
        nn.init.normal_(of_offset.table)
        cells = torch.randint(9, (36, 2) if name == "grid" else (36,), generator=generator)
        places_of_rank = shard.split(cells, dim=0)
        for actual, expected in (
            (of_offset(shard), of_offset(graph)),
            (of_offset(shard, positions=places_of_rank), of_offset(graph, positions=cells)),
            (of_distance(shard.split(places), shard), of_distance(places, graph)),
        ):
            y = shard.gather(layer(shard.split(x), shard, edge_bias=actual))
            torch.testing.assert_close(y, layer(x, graph, edge_bias=expected), **CLOSE)


def graphs_that_divide_tokens_differently_are_refused(ranks: Mesh) -> None:
    model = ga.models.SequenceEncoder(VOCAB, 16, 2, 4)
    one = ranks.shard(ga.causal_graph(8))
    longer = ranks.shard(ga.causal_graph(12))
    other_group = ga.distributed.shard(ga.causal_graph(8), ranks.mesh["dp"])
    tokens = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"4 of 8 tokens on rank . of 2 for block 0 and 6 of 12"):
        model(tokens, [one, longer])
    with pytest.raises(ValueError, match="same group"):
        model(tokens, [one, other_group])
    with pytest.raises(ValueError, match="ShardedGraph for block 0 and TokenGraph for block 1"):
        model(tokens, [one, ga.causal_graph(4)])
    model(tokens, [one, ranks.shard(ga.causal_window_graph(8, 2))])


def a_sequence_is_dropped_on_all_ranks_or_on_none(ranks: Mesh) -> None:
    tokens, _, _ = tokens_labels_and_mask()
    for graph in (
        ga.window_path_graph(N, 4, self_loops=True),
        ga.batch([ga.causal_graph(12), ga.causal_graph(4), ga.causal_graph(17)]),
    ):
        torch.manual_seed(0)
        model = ga.models.SequenceEncoder(VOCAB, 16, 3, 4, drop_path=0.6)
        shard = ranks.shard(graph)
        torch.manual_seed(5)
        expected = model(tokens, graph)
        torch.manual_seed(5 if ranks.mesh["cp"].get_local_rank() == 0 else 6)
        actual = shard.gather(model(shard.split(tokens), shard))
        torch.testing.assert_close(actual, expected, **CLOSE)


# Losses.


def the_mean_over_tokens_is_that_of_all_ranks(ranks: Mesh) -> None:
    losses = torch.randn(BATCH, N, generator=draws())
    counts = torch.rand(BATCH, N, generator=draws(2)) > 0.5
    counts[:2, : N // 2 + 1] = False  # nothing on the first rank
    shard = ranks.shard(ga.causal_graph(N))
    expected = losses[counts].mean()
    for group in (None, ranks.mesh, dist.group.WORLD):
        of_rank = shard.split(*ranks.rows(losses.clone(), counts), dim=-1)
        given = of_rank[0].masked_fill(~of_rank[1], torch.nan).requires_grad_()
        actual = ga.distributed.token_mean(given, of_rank[1], group)
        torch.testing.assert_close(actual, expected, **CLOSE)
        (gradient,) = torch.autograd.grad(actual, given)
        torch.testing.assert_close(gradient, of_rank[1] * (RANKS / counts.sum()), **CLOSE)
    half = ga.distributed.token_mean(of_rank[0].bfloat16())
    assert half.dtype == torch.float32
    assert ga.distributed.token_mean(of_rank[0], of_rank[1] & False) == 0
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        ga.distributed.token_mean(of_rank[0], of_rank[0])
    with pytest.raises(ValueError, match="group must be a DeviceMesh"):
        ga.distributed.token_mean(of_rank[0], group=3)


def masked_tokens_of_all_ranks_have_one_mean(ranks: Mesh) -> None:
    tokens, _, valid = tokens_labels_and_mask()
    logits = torch.randn(BATCH, N, VOCAB, generator=draws())
    _, masked = ga.train.mask_tokens(tokens, 28, mask_ratio=0.4, valid=valid, generator=draws(3))
    shard = ranks.shard(ga.causal_graph(N))
    of_rank = shard.split(*ranks.rows(logits, tokens, masked))
    actual = ga.train.masked_token_loss(*of_rank, group=ranks.mesh)
    expected = ga.train.masked_token_loss(logits, tokens, masked)
    torch.testing.assert_close(actual, expected, **CLOSE)


# Engines.


def train_as_one_process_does(
    ranks: Mesh, wrap: Callable[[Any], Any], reentrant: bool | None = None, taken: int = 3
) -> None:
    """Take steps over all ranks, and the same steps in every process with all tokens."""
    tokens, labels, valid = tokens_labels_and_mask()
    graph = ga.window_path_graph(N, 5, self_loops=True)
    shard = ranks.shard(graph)
    model = encoder()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    parts = shard.split(*ranks.rows(tokens, labels, valid))

    def of_all(model: nn.Module) -> Tensor:
        losses = token_losses(model, tokens, labels, graph, valid)
        return losses[valid.flatten()].mean()

    def of_rank(model: nn.Module) -> Tensor:
        losses = token_losses(model, parts[0], parts[1], shard, parts[2])
        return ga.distributed.token_mean(losses, parts[2].flatten())

    together, alone = steps(wrap(model), of_rank), steps(encoder(), of_all)
    for _ in range(taken):
        check_equal(next(together), next(alone))


def ddp(ranks: Mesh) -> None:
    train_as_one_process_does(ranks, DistributedDataParallel)


def ddp_with_checkpoints(ranks: Mesh) -> None:
    train_as_one_process_does(ranks, DistributedDataParallel, reentrant=False)


def ddp_with_reentrant_checkpoints(ranks: Mesh) -> None:
    train_as_one_process_does(ranks, DistributedDataParallel, reentrant=True)


def fsdp(ranks: Mesh) -> None:
    train_as_one_process_does(ranks, with_fsdp)


def fsdp_with_checkpoints(ranks: Mesh) -> None:
    train_as_one_process_does(ranks, with_fsdp, reentrant=False)


def fsdp_with_reentrant_checkpoints(ranks: Mesh) -> None:
    train_as_one_process_does(ranks, with_fsdp, reentrant=True)


def hybrid_fsdp(ranks: Mesh) -> None:
    """Parameters divided over "cp", and replicated over "dp"."""
    train_as_one_process_does(ranks, lambda model: with_fsdp(model, ranks.mesh))


def images_whose_patches_are_divided(ranks: Mesh) -> None:
    """Every rank computes the same logits from its gathered tokens, and the same loss."""
    images = torch.randn(BATCH, 1, 8, 8, generator=draws())
    classes = torch.randint(3, (BATCH,), generator=draws())
    for pooling in ("class", "mean"):

        def model(pooling: Any = pooling) -> ga.models.VisionTransformer:
            torch.manual_seed(0)
            return ga.models.VisionTransformer(
                8, 2, 3, 16, 2, 4, channels=1, mixer="gka", pooling=pooling
            )

        shards = [ranks.shard(graph) for graph in model().graphs()]
        parts = ranks.rows(images, classes)
        together = steps(
            DistributedDataParallel(model()),
            lambda m, s=shards, o=parts: functional.cross_entropy(m(o[0], s), o[1]),
        )
        alone = steps(model(), lambda m: functional.cross_entropy(m(images), classes))
        for _ in range(3):
            actual, expected = next(together), next(alone)
            dist.all_reduce(actual["loss"])
            actual["loss"] /= RANKS
            check_equal(actual, expected)


def compiled_blocks(ranks: Mesh) -> None:
    def wrap(model: Any) -> Any:
        for block in model.blocks[-1:]:
            block.compile(backend="aot_eager")
        return DistributedDataParallel(model)

    train_as_one_process_does(ranks, wrap)


# Checkpoints. Afterwards the processes are no group of four any more.


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = encoder()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_of(model: nn.Module, optimizer: Any, *, whole: bool = False) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=whole)
    states = get_state_dict(model, optimizer, options=options)
    return dict(zip(("model", "optimizer"), states, strict=True))


def restored(path: Path, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, and return all that they hold."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state_of(model, optimizer, whole=True)


def flat(state: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts."""
    if isinstance(state, Tensor):
        return {name: state}
    if not isinstance(state, dict):
        return {}
    return {k: x for key, value in state.items() for k, x in flat(value, f"{name}/{key}").items()}


def a_checkpoint_of_four_ranks_is_loaded_by_two_and_by_one(ranks: Mesh, folder: Path) -> None:
    path, rank = folder / "checkpoint", dist.get_rank()
    tokens, labels, valid = tokens_labels_and_mask()
    shard = ranks.shard(ga.window_path_graph(N, 5, self_loops=True))
    parts = shard.split(*ranks.rows(tokens, labels, valid))
    model = with_fsdp(encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = token_losses(model, parts[0], parts[1], shard, parts[2])
    ga.distributed.token_mean(losses, parts[2].flatten()).backward()
    optimizer.step()
    dcp.save(state_of(model, optimizer), checkpoint_id=path)
    expected = flat(state_of(model, optimizer, whole=True))
    dist.destroy_process_group()
    if rank == 3:
        return
    if rank == 2:  # alone, without a process group
        alone, own_optimizer = learner()
        actual = flat(restored(path, alone, own_optimizer))
        plain = dict(encoder().state_dict())
        dcp.load({"model": plain}, checkpoint_id=path)  # into the state of a model, as it is
        check_equal(plain, dict(alone.state_dict()))
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'two'}", rank=rank, world_size=2
        )
        both = with_fsdp(encoder())
        actual = flat(restored(path, both, torch.optim.AdamW(both.parameters(), lr=1e-2)))
        assert len(get_model_state_dict(both)) == len(get_model_state_dict(encoder()))
        dist.destroy_process_group()
    # Whole states are on every rank.
    moments = [name for name in expected if "exp_avg" in name]
    assert len(moments) == 2 * len(list(encoder().parameters()))
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name
