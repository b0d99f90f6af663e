"""Looking at kernels without a GPU: ``python -m graphattn.kernels.check``.

No kernel imports anything of this folder.

- `machine_code`: instructions and loops, read from text.
- `compile`: a launch compiled ahead of time, and what its machine code says.
- `prediction`: how long it would take on an H200, if one unit were the only limit.
- `families`: the launches of all families that are looked at.
- `report`: all of them compiled, judged and set in tables.
"""
