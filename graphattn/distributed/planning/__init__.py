"""Plans of communication, which are made from a graph alone, for any number of ranks."""
