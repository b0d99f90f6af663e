"""Commands of training: train, evaluate, generate, sweep."""
