"""Training runs: configuration, setup, and the folder with its files."""
