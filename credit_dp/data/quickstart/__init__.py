"""The embedded climate: a three-level quasi-geostrophic atmosphere that makes its own data set.

`build` writes a store like those of WeatherBench 2; `store_name` is its name in the cache.
"""

from credit_dp.data.quickstart.dataset import build, store_name

__all__ = ["build", "store_name"]
