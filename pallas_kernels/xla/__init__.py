"""XLA paths of the paged attention functions."""
