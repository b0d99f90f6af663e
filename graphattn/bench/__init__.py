"""Benchmarks: every operation compared with its peers, on the same inputs, in one process.

`cases/` defines what is measured, `contenders/` are implementations by us and by others, `models/`
are whole models, `measuring/` checks results and measures time and memory, and `reporting/` stores,
prints and draws the results. The command is `graphattn bench`.
"""
