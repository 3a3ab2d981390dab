"""Copies the fields that a run needs into a prepared store, the format that ranks read fastest."""
