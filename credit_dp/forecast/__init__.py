"""Forecasting: one step of a model, and many in a row."""
