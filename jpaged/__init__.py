"""jpaged: PagedAttention as a functional JAX program."""
