"""Everything that is worth doing with a GPU that is there for half an hour: `make gpu`.

Each step ends within nine minutes. It writes rows as they come, and goes on where it was cut off:

- `parity`: problems that start every kernel, compared with float64.
- `sanitizer`: some of them under NVIDIA's compute-sanitizer.
- `benchmark`: what `graphattn bench --device cuda` measures.
- `tune`: other sizes of tiles, and whether they are faster.
- `report`: what all of them found, in one file.

`session` is what all steps share, and `jobs` and `worker` run their jobs in processes. The emulator
(`../emulator`) can take the place of the GPU, so that the day needs no rehearsal. Nothing here
needs more than PyTorch, Triton, numpy and what the library imports.
"""
