"""Data sources: one class for each storage format, all with the interface `base.Source`."""
