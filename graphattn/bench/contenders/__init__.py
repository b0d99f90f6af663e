"""Ways to compute an operation: ours, and what others offer or write by hand."""
