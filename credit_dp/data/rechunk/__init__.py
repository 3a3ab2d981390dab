"""Copies what a run needs of a store into the prepared form, which ranks read fastest."""
