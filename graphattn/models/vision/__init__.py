"""Vision models: vision transformers, Swin, and weights of other libraries for them."""
