"""An emulator of NVIDIA's GPUs that runs Triton's compiled kernels on a CPU and watches them.

Triton's interpreter executes a kernel's source, one block after another. What the compiler makes
of it (layouts, copies through shared memory, barriers, matrix instructions) is never run there.
This emulator executes the compiler's output, PTX for sm_80 and sm_90, on CPU tensors. It notices

- accesses out of bounds, of device memory and of shared memory,
- races: between warps without a barrier, between threads of a warp, and between blocks,
- asynchronous copies and matrix products that nobody waits for, waits for the wrong phase of an
  ``mbarrier``, and arrivals that come too early or are missing,
- barriers that some threads of a block never reach.

In this order:

- `ptx`: the text of a kernel, as instructions.
- `machine`: threads of several blocks, their registers, and the order in which they run.
- `arithmetic`, `transfers`, `warps`, `matrices`, `memory_barriers`, `bulk_copies`: what every
  instruction does.
- `shared_memory`, `global_memory`, `findings`: what is watched.
- `device`: launches of the library on the emulator.

It is no model of time, of caches, or of the order in which different blocks see writes.
"""
