"""Score forecasts against the truth, persistence and climatology; write tables, plots and maps.

The table in `metric_table` drives two paths, which both compute the scores of `metrics`: `held_out`
scores a run's own model on its test dates, on all ranks; `score` scores any stored forecast in one
process.
"""
