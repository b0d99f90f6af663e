"""Drawing that all figures share: colours, axes, pixels, cells."""
