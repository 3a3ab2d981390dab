"""Opens whatever `data.store` names."""

from credit_dp.config import DataConfig
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.source import Source
from credit_dp.errors import UserError


def open_source(config: DataConfig) -> Source:
    """Open what `config.store` names, in whatever form it is.

    Raises:
        UserError: there is nothing, nothing that can be read, or its coordinates are not as needed.
    """
    if not config.stores:
        raise UserError("data.store: needs the path of a zarr store, but is empty. Set it.")
    return GriddedSource.open(config.stores[0])
