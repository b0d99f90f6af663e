"""Search for nearest neighbours, exact on every device."""
