"""The data path, on small stores made by `stores`."""
