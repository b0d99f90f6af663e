"""Hidden states of a model after every block: spectra, ranks, and the effect of attention."""
