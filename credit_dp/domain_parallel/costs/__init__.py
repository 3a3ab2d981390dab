"""Counts operations, memory and messages of a sharded model, in one process and without data."""
