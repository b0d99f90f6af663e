"""Everything that is worth doing with a GPU that is there for minutes: `make gpu`.

A command ends within nine minutes. It writes rows as they come, and the next one goes on where it
was cut off. The steps are in the order of what is missing:

- `parity`: problems that start every kernel, compared with float64.
- `candidates`: kernels that must be asked for, compared with float64 and with those of today.
- `benchmark`: what `graphattn bench --device cuda` measures.
- `sanitizer`: some problems under NVIDIA's compute-sanitizer.
- `times`: every launch whose time is predicted.
- `tune`: other sizes of tiles, and whether they are faster.
- `report`: what all of them found, in one file, and beside earlier `visits`.

`plan` tells the minutes of all this without a GPU, and `ahead` compiles kernels before. What all
steps share is in `session`; `jobs` and `worker` run their jobs in processes. The emulator
(`../emulator`) can take the place of the GPU, to rehearse. Nothing here needs more than PyTorch,
Triton, numpy and what the library imports.
"""

from __future__ import annotations

import os

AHEAD = "GRAPHATTN_AHEAD"  # names the folder of a cache that `ahead` has made


def _read_what_was_compiled_ahead() -> None:
    """Let Triton find its kernels in that folder, whatever build of its version made them.

    Kernels that it compiles have no numbers of lines, which are three quarters of their files: the
    folder may have to travel.
    """
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
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
