"""Workloads of the benchmark: their graphs, sizes, inputs and targets."""
