"""Movie-review sentences read by a small BERT: a table of our own, of every method that converts an encoder."""
