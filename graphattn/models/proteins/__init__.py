"""Protein models: residues along chains and in space, and scores of mutations."""
