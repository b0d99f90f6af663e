"""Hidden states of a model, block by block: spectra, ranks, and what attention adds."""
