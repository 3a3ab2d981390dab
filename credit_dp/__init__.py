"""Train global weather models sharded by latitude, equal to the model on one device."""

__version__ = "0.1.0"
