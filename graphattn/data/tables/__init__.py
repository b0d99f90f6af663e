"""Tables: rows of cells, and a tokenizer that makes one token of every cell."""
