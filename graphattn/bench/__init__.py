"""Benchmarks: every operation beside its peers, on the same inputs, in one process.

`cases/` says what is measured, `contenders/` are ours and others' ways to compute it, `models/` are
whole models, `measuring/` checks, times and weighs them, and `reporting/` keeps, prints and draws
what was found. The command is `graphattn bench`.
"""
