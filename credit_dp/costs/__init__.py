"""Estimates and checks: memory, traffic and time of a step on any mesh, without ranks or data."""
