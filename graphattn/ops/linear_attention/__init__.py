"""Linear attention: averages whose weights are products of positive features."""
