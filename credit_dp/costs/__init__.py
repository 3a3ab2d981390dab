"""Estimates and checks: memory and traffic of a step on any mesh, without ranks or data."""
