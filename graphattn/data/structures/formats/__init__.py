"""Formats of structure files: their syntax, atoms and biological assemblies."""
