"""Records hashes of outputs and gradients, to show that a change of the inside changes no bit.

    python tests/recorded_bits.py record before.json
    ... move files, rename, rewrite ...
    python tests/recorded_bits.py compare before.json

Only public names are used, so the script runs before and after any change that keeps those. Its
cases are layers and operations, over every graph of the tests, with every backend that runs here
(Triton's interpreter included), in float64, float32 and bfloat16, with padding, rotary embeddings,
options, caches and neighbour searches. A record holds for one machine and one build of PyTorch:
keep it outside of the repository, and make it anew for every change.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":  # and not where doctests are collected
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "ops"))

from cases_ops import BACKENDS, ENERGY, FEW, GRAPHS, edge_network, qkv, random, sides, valid_tokens

import graphattn as ga

Outcome = tuple[Tensor, ...]
Case = Callable[[], Outcome]
OPTIONS: dict[str, dict[str, object]] = {
    "dot": {},
    "dot, top 2": {"top_k": 2},
    "dot, softcap and sink": {"softcap": 2.0, "sink": 0.3},
    "rbf": {"sigma": 1.3},
    "rbf, top 2": {"sigma": 0.7, "top_k": 2},
    "rbf, eps": {"sigma": 1.1, "eps": 0.1},
    "linear": {},
}
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "dot": lambda: ga.nn.DotProductAttention(16, 4, kv_heads=2),
    "dot, rope": lambda: ga.nn.DotProductAttention(16, 2, rope=True),
    "dot, sink": lambda: ga.nn.DotProductAttention(16, 2, sink=True, softcap=3.0, top_k=3),
    "gaussian": lambda: ga.nn.GaussianKernelAttention(16, 4),
    "gaussian, rope": lambda: ga.nn.GaussianKernelAttention(16, 2, rope=True, eps=0.1),
    "krause": lambda: ga.nn.KrauseAttention(16, 4, top_k=2),
    "krause, rope": lambda: ga.nn.KrauseAttention(16, 2, kv_heads=1, rope=True),
    "linear": lambda: ga.nn.LinearAttention(16, 2),
    "linear, rope": lambda: ga.nn.LinearAttention(16, 2, rope=True, eps=0.1),
    "consensus": lambda: ga.nn.SelfConsensus(16, 2, rank=2, edge_hidden=8),
    "consensus, auto": lambda: ga.nn.SelfConsensus(
        16, 2, rank=2, edge_hidden=8, step_size="auto", trunk="separate"
    ),
    "consensus, target": lambda: ga.nn.SelfConsensus(
        16, 4, rank=2, edge_hidden=8, step_size="learned", update="target", rope=True
    ),
    "consensus, isometric": lambda: ga.nn.SelfConsensus(
        16, 2, rank=2, edge_hidden=8, rope="isometric", edge_input="full"
    ),
}


def with_gradients(outputs: Outcome | Tensor, leaves: list[Tensor]) -> Outcome:
    """Outputs, and the gradients of a fixed weighted sum of them."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((x * random(*x.shape, seed=9, dtype=x.dtype)).sum() for x in outputs)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return (*outputs, *(x for x in found if x is not None))


def operation(name: str, graph_name: str, backend: str, dtype: torch.dtype, padded: bool) -> Case:
    def run() -> Outcome:
        graph = GRAPHS[graph_name]()
        tensors = [x.requires_grad_() for x in qkv(graph, batch=(2,), features=8, dtype=dtype)]
        options = dict(OPTIONS[name])
        if padded:
            N, M = sides(graph)
            options["valid"] = valid_tokens(2, N, seed=1), valid_tokens(2, M, seed=2)
        op = {"dot": ga.dot_product_attention, "rbf": ga.rbf_attention, "lin": ga.linear_attention}
        if name.startswith("lin"):
            tensors = [x.exp().detach().requires_grad_() for x in tensors[:2]] + tensors[2:]
        return with_gradients(
            op[name[:3]](*tensors, graph, backend=backend, **options),
            tensors,
        )

    return run


def consensus(graph_name: str, backend: str, dtype: torch.dtype, update: str, step: object) -> Case:
    def run() -> Outcome:
        graph = GRAPHS[graph_name]()
        u = random(2, graph.num_targets, 2, 3, seed=1, dtype=dtype).requires_grad_()
        hidden = [random(2, graph.num_targets, 2, 4, seed=s, dtype=dtype) for s in (2, 3)]
        leaves = [u, *(h.requires_grad_() for h in hidden)]
        network = ga.EdgeNetworkParameters(*(p.requires_grad_() for p in edge_network(dtype=dtype)))
        new = ga.consensus_update(
            u,
            u,
            *hidden,
            network,
            graph,
            step,
            update=update,
            backend=backend,
        )
        return with_gradients(new, [*leaves, *network])

    return run


def layer(name: str, graph_name: str, dtype: torch.dtype, mode: str) -> Case:
    def run() -> Outcome:
        torch.manual_seed(0)
        module, graph = LAYERS[name]().to(dtype), GRAPHS[graph_name]()
        x = random(2, graph.num_targets, 16, seed=4, dtype=dtype).requires_grad_()
        options = {"valid": valid_tokens(2, graph.num_targets, seed=3)} if mode == "padded" else {}
        if mode == "no gradient":
            with torch.no_grad():
                return (module(x, graph),)
        if mode == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = module(x, graph)
        else:
            y = module(x, graph, **options)
        return with_gradients(y, [x, *module.parameters()])

    return run


def generation(name: str, dtype: torch.dtype, window: int | None) -> Case:
    def run() -> Outcome:
        torch.manual_seed(0)
        module = LAYERS[name]().to(dtype)
        x = random(2, 12, 16, seed=6, dtype=dtype)
        cache = module.init_cache(2, window, dtype=dtype)
        with torch.no_grad():
            return tuple(module.step(x[:, i : i + 1], cache) for i in range(12))

    return run


def search(dtype: torch.dtype, count: int, width: int) -> Case:
    def run() -> Outcome:
        points = random(count, width, seed=count + width, dtype=dtype)
        index, squared = ga.knn(points, 5)
        inside = ga.radius_graph(points, 0.5 * width**0.5).edge_index
        return index, squared, ga.knn_graph(points, 4, self_loops=True).edge_index, inside

    return run


def structure(graph_name: str) -> Case:
    def run() -> Outcome:
        graph = GRAPHS[graph_name]()
        lists = [graph.edge_index]
        if graph.num_targets == graph.num_sources:
            moved, order = graph.reorder()
            lists += [moved.edge_index, order]
        return tuple(lists)

    return run


def cases() -> Iterator[tuple[str, Case]]:
    """Names and what they run."""
    kinds = (torch.float64, torch.float32, torch.bfloat16)
    for graph_name in GRAPHS:
        yield f"lists of {graph_name}", structure(graph_name)
        for name in OPTIONS:
            for backend in ("auto",) if name == "linear" else BACKENDS:
                for dtype in kinds[:2] if graph_name in FEW else kinds[1:2]:
                    title = f"{name}; {backend}; {graph_name}; {dtype}"
                    yield title, operation(name, graph_name, backend, dtype, padded=False)
    for graph_name in FEW:
        for name in OPTIONS:
            yield (
                f"{name}; bfloat16; {graph_name}",
                operation(name, graph_name, "auto", torch.bfloat16, padded=False),
            )
            yield (
                f"{name}; padded; {graph_name}",
                operation(name, graph_name, "auto", torch.float32, padded=True),
            )
    for graph_name in ENERGY:
        for update, step in (("energy", 0.1), ("energy", "auto"), ("target", "auto")):
            for backend in ("auto", "reference", "structured"):
                yield (
                    f"consensus {update} {step}; {backend}; {graph_name}",
                    consensus(graph_name, backend, torch.float32, update, step),
                )
    for graph_name in ("path with self loops", "causal window", "grid with class token", "union"):
        for name in LAYERS:
            if graph_name == "causal window" and "consensus" in name and "target" not in name:
                continue
            for mode in ("plain", "padded", "no gradient", "autocast"):
                yield (
                    f"layer {name}; {mode}; {graph_name}",
                    layer(name, graph_name, torch.float32, mode),
                )
    for graph_name in ("path with self loops", "complete", "union"):
        for name in ("dot", "dot, top 2", "rbf", "rbf, top 2"):
            yield (
                f"{name}; triton; {graph_name}",
                operation(name, graph_name, "triton", torch.float32, padded=False),
            )
    for update in ("energy", "target"):
        yield (
            f"consensus {update}; triton",
            consensus("path", "triton", torch.float32, update, "auto"),
        )
    for name in LAYERS:
        if "consensus" not in name or "target" in name:
            for window in (None, 4):
                if not (name.startswith("linear") and window):
                    yield (
                        f"steps of {name}; window {window}",
                        generation(name, torch.float32, window),
                    )
    for count, width in ((40, 2), (300, 3), (700, 8), (600, 20), (500, 70)):
        for dtype in kinds[:2]:
            yield f"search of {count} x {width}; {dtype}", search(dtype, count, width)


def digest(case: Case) -> str:
    """A hash of the bits of all tensors; of a refusal, its kind."""
    try:
        tensors = case()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    total = hashlib.sha256()
    for x in tensors:
        plain = x.detach().contiguous()
        total.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        total.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def main(command: str, file: str) -> int:
    torch.set_num_threads(1)
    found = {name: digest(case) for name, case in cases()}
    refused = [name for name, value in found.items() if ": " in value]
    print(f"{len(found)} cases, {len(refused)} of them refused")
    if command == "record":
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(Path(file).read_text())
    names = [*before, *(name for name in found if name not in before)]
    other = [name for name in names if before.get(name) != found.get(name)]
    for name in other:
        print(f"differs: {name}: {before.get(name)} -> {found.get(name)}")
    print(f"{len(names) - len(other)} of {len(names)} have the same bits")
    return int(bool(other))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "compare"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
