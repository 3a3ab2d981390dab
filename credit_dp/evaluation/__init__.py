"""Evaluation: how well forecasts of held-out dates do, as numbers, a table and a map."""
