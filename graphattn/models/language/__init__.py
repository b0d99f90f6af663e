"""Language models: causal models, generation and sampling."""
