"""Peers: how others compute a case, each written as the users of its library write it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.bench.cases.inputs import (
    AttentionInputs,
    MissingError,
    NeighborInputs,
    SpectralInputs,
    StreamInputs,
    WindowSize,
)

Run = Callable[[Any], Any]


def free_memory(device: torch.device) -> float:
    """Return the number of free bytes, or 8 GB if the system does not report it."""
    if device.type == "cuda":
        held_and_unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return float(torch.cuda.mem_get_info(device)[0] + held_and_unused)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 8e9
    return next((1024.0 * int(s.split()[1]) for s in lines if s.startswith("MemAvailable")), 8e9)


def check_memory(numbers: float, what: str, like: Tensor) -> None:
    """Raise a MissingError if six tensors of `numbers` elements need 80 % of the free memory."""
    size = 6.0 * like.element_size() * numbers
    if size > 0.8 * free_memory(like.device):
        raise MissingError(f"{what} would need about {1e-9 * size:,.0f} GB")


def check_memory_of_edges(x: AttentionInputs) -> None:
    """Raise a MissingError if the features of all edges would need too much memory."""
    sequences = x.query.shape[:-3].numel()
    numbers = float(x.graph.num_edges) * sequences * x.query.shape[-2:].numel()
    check_memory(numbers, "its messages", x.query)


def check_memory_of_edge_networks(num_edges: int, network: ga.EdgeNetworkParameters) -> None:
    """Raise a MissingError if the matrices Lambda of all edges would need too much memory."""
    numbers = float(num_edges) * network.shear_bias.numel()
    check_memory(numbers, "its edge networks", network.shear)


def needs_compiler(device: torch.device) -> None:
    """Raise a MissingError on a CPU if no C++ compiler is found."""
    if device.type == "cpu" and shutil.which("c++") is None:
        raise MissingError("torch.compile needs a C++ compiler on a CPU")


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once for the sizes of one case."""
    return torch.compile(function, dynamic=False)


def only_on_a_cpu(device: torch.device) -> None:
    """Raise a MissingError on any device but a CPU."""
    if device.type != "cpu":
        raise MissingError("it is written only for CPUs")


# Attention.


def masked_dense(x: AttentionInputs) -> Tensor:
    """Compute the logits of all pairs, mask them, select the top-k: as code of papers does."""
    rows = x.query.shape[:-3].numel() * x.query.shape[-2] * x.graph.num_targets
    check_memory(float(rows) * x.graph.num_sources, "all pairs", x.query)
    q, k, v = (t.transpose(-3, -2) for t in (x.query, x.key, x.value))
    no_edge = ~x.graph.to_mask()
    logits = _logits(q, k, x.sigma).masked_fill(no_edge, -torch.inf)
    if x.top_k is not None and x.top_k < logits.shape[-1]:
        scores = logits.detach()
        if scores.dtype != torch.float32:  # bfloat16 is too coarse to rank near keys
            with torch.no_grad(), products_in_tf32():
                scores = _logits(q.float(), k.float(), x.sigma).masked_fill(no_edge, -torch.inf)
        threshold = scores.topk(x.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(scores < threshold, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(-3, -2)


def _logits(query: Tensor, key: Tensor, sigma: float) -> Tensor:
    return (query @ key.mT - key.square().sum(-1)[..., None, :] / 2) / sigma**2


@contextmanager
def products_in_tf32() -> Iterator[None]:
    """Multiply in TF32, which represents every bfloat16 number exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _gather_scatter(
    x: AttentionInputs, softmax: Callable[..., Tensor], add: Callable[..., Tensor]
) -> Tensor:
    """Compute RBF attention as hand-written message passing, with one message per edge."""
    check_memory_of_edges(x)
    source, target = x.graph.edge_index
    difference = x.query.index_select(-3, target) - x.key.index_select(-3, source)
    logits = -difference.square().sum(-1) / (2 * x.sigma**2)
    weights = softmax(logits, target, x.graph.num_targets)
    return add(weights[..., None] * x.value.index_select(-3, source), target, x.graph.num_targets)


def _softmax(logits: Tensor, target: Tensor, num_targets: int) -> Tensor:
    rows = (*logits.shape[:-2], num_targets, logits.shape[-1])
    index = target[:, None].expand_as(logits)
    highest = logits.new_full(rows, -torch.inf).scatter_reduce(-2, index, logits.detach(), "amax")
    exponential = (logits - highest.index_select(-2, target)).exp()
    total = logits.new_zeros(rows).index_add(-2, target, exponential)
    return exponential / total.index_select(-2, target)


def _add(messages: Tensor, target: Tensor, num_targets: int) -> Tensor:
    shape = (*messages.shape[:-3], num_targets, *messages.shape[-2:])
    return messages.new_zeros(shape).index_add(-3, target, messages)


def index_add(x: AttentionInputs) -> Tensor:
    """Compute RBF attention by gathering, and by scattering with PyTorch's index_add."""
    return _gather_scatter(x, _softmax, _add)


def torch_scatter(x: AttentionInputs) -> Tensor:
    """Compute RBF attention by gathering, and by scattering with torch-scatter."""
    scatter = installed("torch_scatter")
    return _gather_scatter(
        x,
        lambda logits, target, n: scatter.scatter_softmax(logits, target, dim=-2, dim_size=n),
        lambda messages, target, n: scatter.scatter_add(messages, target, dim=-3, dim_size=n),
    )


def keops(x: AttentionInputs) -> Tensor:
    """Compute RBF attention over a complete graph with the symbolic matrices of KeOps."""
    LazyTensor = installed("pykeops.torch").LazyTensor
    q, k, v = (t.transpose(-3, -2).contiguous() for t in (x.query, x.key, x.value))
    difference = LazyTensor(q[..., :, None, :]) - LazyTensor(k[..., None, :, :])
    logits = -difference.square().sum(-1) / (2 * x.sigma**2)
    # The symbolic tensor [*, H, N, M, D] is reduced over its sources. The attribute `ndim` of a
    # symbolic tensor is D, so the axis has to come from `q`.
    of_sources = q.dim() - 1
    out = logits.sumsoftmaxweight(LazyTensor(v[..., None, :, :]), axis=of_sources)
    return out.transpose(-3, -2)


def installed(name: str) -> Any:
    """Import a module and return it; raise a MissingError if its package is not installed."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        raise MissingError(f"{name.split('.')[0]} is not installed")
    return importlib.import_module(name)


# Nearest neighbours. Each peer returns (squared distances, indices), the nearest first.


def cdist_topk(x: NeighborInputs) -> tuple[Tensor, Tensor]:
    distance = torch.cdist(x.points, x.points).fill_diagonal_(torch.inf)
    nearest, index = distance.topk(x.k, largest=False)
    return nearest.square(), index


def sklearn_brute(x: NeighborInputs) -> tuple[Tensor, Tensor]:
    if x.points.device.type != "cpu":
        raise MissingError("scikit-learn searches only on a CPU")
    search = installed("sklearn.neighbors").NearestNeighbors(n_neighbors=x.k, algorithm="brute")
    distance, index = search.fit(x.points.numpy()).kneighbors()
    return torch.from_numpy(distance).square(), torch.from_numpy(index)


def faiss_flat(x: NeighborInputs) -> tuple[Tensor, Tensor]:
    """Search by brute force with FAISS; every point finds itself first, which is removed."""
    faiss = installed("faiss")
    installed("faiss.contrib.torch_utils")  # lets FAISS accept tensors
    if x.points.device.type == "cpu":
        distance, index = faiss.knn(x.points, x.points, x.k + 1)
    elif hasattr(faiss, "StandardGpuResources"):
        distance, index = faiss.knn_gpu(faiss_resources(), x.points, x.points, x.k + 1)
    else:
        raise MissingError("faiss is installed without GPU support")
    return distance[:, 1:], index[:, 1:]


@cache
def faiss_resources() -> Any:
    """Return FAISS' memory and streams; making them takes longer than a search."""
    return installed("faiss").StandardGpuResources()


# Graphs and their spectra.


def offsets_and_mask(x: WindowSize) -> Tensor:
    """List the edges of a window as scripts do: form all offsets, mask those beyond the ends."""
    target = torch.arange(x.num_tokens)[:, None]
    offsets = torch.arange(-x.window, x.window + 1)
    source = target + offsets[offsets != 0]
    inside = (source >= 0) & (source < x.num_tokens)
    return torch.stack([source[inside], target.expand_as(source)[inside]])


def shift_invert_lanczos(x: SpectralInputs) -> float:
    """Compute the Fiedler value by scipy's eigsh, with a shift just below 0."""
    return float(smallest_eigenpairs(x, 2)[0][1])


def smallest_eigenpairs(x: SpectralInputs, count: int) -> tuple[Any, Any]:
    """Compute the smallest eigenpairs of the Laplacian of the symmetrised weights, ascending."""
    from scipy import sparse
    from scipy.sparse.linalg import eigsh

    N = x.graph.num_tokens
    adjacency = sparse.coo_array(
        (x.edge_weight.numpy(), tuple(x.graph.edge_index.numpy())), shape=(N, N)
    ).tocsc()
    laplacian = sparse.csgraph.laplacian((adjacency + adjacency.T) / 2)
    shift = -1e-8 * laplacian.diagonal().max()
    return eigsh(laplacian, k=count, sigma=shift, which="LM")


# One token of a stream.


def projections_alone(x: StreamInputs) -> Tensor:
    """Compute the query, key, value and output projections of one token per text, no attention."""
    layer, token = x.late.layer, x.late.tokens[0]
    layer.query_proj(token)
    layer.key_proj(token)
    return layer.output_proj(layer.value_proj(token))
