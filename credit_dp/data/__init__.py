"""Read weather stores: fields, channels, dates, statistics, climatology and training batches.

Everything here takes row slices and never a device mesh. `setup` prepares the data of a run,
`loader` reads the batches, `store` gives the fields, and `sources` has a reader per file format.
"""
