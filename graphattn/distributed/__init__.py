"""Sequences longer than one machine: the graph says which tokens a rank needs of another rank."""
