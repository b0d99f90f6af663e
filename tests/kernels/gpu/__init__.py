"""Everything that is worth doing with a GPU that is there for half an hour: `make gpu`.

Each step ends within nine minutes. It writes rows as they come, and goes on where it was cut off:

- `parity`: problems that start every kernel, compared with float64.
- `times`: every launch whose time is predicted.
- `sanitizer`: some of them under NVIDIA's compute-sanitizer.
- `benchmark`: what `graphattn bench --device cuda` measures.
- `tune`: other sizes of tiles, and whether they are faster.
- `report`: what all of them found, in one file.

`session` is what all steps share, and `jobs` and `worker` run their jobs in processes. The emulator
(`../emulator`) can take the place of the GPU, so that the day needs no rehearsal. Nothing here
needs more than PyTorch, Triton, numpy and what the library imports.
"""

from __future__ import annotations

import os

AHEAD = "GRAPHATTN_AHEAD"  # names the folder of a cache that `ahead` has made


def _read_what_was_compiled_ahead() -> None:
    """Let Triton find its kernels in that folder, whatever build of its version made them."""
    from triton.backends.nvidia import compiler as nvidia
    from triton.compiler import compiler
    from triton.runtime import cache

    def same(*arguments: object) -> str:
        return "ahead"

    os.environ["TRITON_CACHE_DIR"] = os.environ[AHEAD]
    cache.triton_key = same
    nvidia.file_hash = same
    nvidia.CUDABackend.hash = lambda self: f"ahead-{self.target.arch}"
    compiler.get_cache_invalidating_env_vars = dict


if os.environ.get(AHEAD):
    _read_what_was_compiled_ahead()
