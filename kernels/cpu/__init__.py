"""Compiled kernels for CPUs: C++ behind a plain C interface; installed as `graphattn.kernels.cpu`.

Like the kernels above them they know tensors and index arrays only. Read them in this order:

- `simd.h`: vectors of floats and doubles, as wide as the instruction set, and their exponential.
- `tasks.h`: a loop over tasks on several threads, and the memory that tasks work in.
- `interface.h`: what a function of the C interface is written with.
- `native.cpp`: what a build is, and entries for tests.
- `library`: which build this process uses, or why none.

`setup.py` builds the same sources once per instruction set (`_native_base`, `_native_v3` for AVX2,
`_native_v4` for AVX-512). Every `.cpp` and `.h` file of this folder belongs to the build. There is
no Python and no torch in it, so one build serves every version of both.
"""
