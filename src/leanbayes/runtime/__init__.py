"""State of forward passes: which pass a recomputation repeats, and where the rows of a batch are."""
