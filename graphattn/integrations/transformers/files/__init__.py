"""Save changed models to files, completely or not at all, and load them."""
