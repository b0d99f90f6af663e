"""Compiled code for CPUs."""
