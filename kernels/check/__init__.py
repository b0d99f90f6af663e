"""Kernels compiled and judged without a GPU: ``python -m graphattn.kernels.check``.

No kernel imports anything of this folder.

- `machine_code`: instructions and loops, read from text.
- `compile`: compiles a launch ahead of time, and reads resources from its machine code.
- `prediction`: how long a launch takes on an H200, from counted work and compiled code.
- `measured`: times of launches on a device, to be shown beside predictions.
- `families`: the launches of all families that are checked.
- `report`: compiles all of them, judges them and makes the tables.
"""
