"""Kernels compiled and judged without a GPU: ``python -m graphattn.kernels.check``.

No kernel imports anything of this folder.

- `machine_code`: instructions and loops, read from text.
- `compile`: compiles a launch ahead of time, and reads resources from its machine code.
- `prediction`: how long a launch would take on an H200 if one unit were the only limit.
- `families`: the launches of all families that are checked.
- `report`: compiles all of them, judges them and makes the tables.
"""
