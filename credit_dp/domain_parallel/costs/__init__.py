"""Counts messages, memory and launches of a sharded model, in one process and without data."""
