"""The embedded climate: a three-level quasi-geostrophic atmosphere that generates a data set.

`build` writes a store in the form of WeatherBench 2; `store_name` is its name in the cache.
`dynamics.py` integrates the model, `physical_fields.py` turns its state into physical fields,
`dataset.py` runs both in processes of `simulation.py` and writes the store.
"""

from credit_dp.data.quickstart.dataset import build, store_name

__all__ = ["build", "store_name"]
