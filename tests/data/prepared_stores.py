"""Writes small stores in the prepared form, without the code of `prepare`."""

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.codecs import Crc32cCodec

from credit_dp.data.channels import Channel
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE, PreparedMetadata

STATIC = ("geopotential_at_surface", "land_sea_mask")


def channels_of(data: xr.Dataset) -> tuple[Channel, ...]:
    """Return all channels that change in time, level by level."""
    found = []
    for name, array in data.data_vars.items():
        if "time" in array.dims:
            levels = data["level"].values.tolist() if "level" in array.dims else [None]
            found += [Channel(str(name), level) for level in levels]
    return tuple(found)


def stacked(data: xr.Dataset, channels: Any) -> np.ndarray:
    """`(T, C, H, W)`, as the dataset has its rows."""
    fields = []
    for channel in channels:
        array = data[channel.variable]
        array = array if channel.level is None else array.sel(level=channel.level)
        fields.append(array.transpose("time", "latitude", "longitude").values)
    return np.stack(fields, axis=1)


def write(data: xr.Dataset, path: Path, chunk_rows: int = 4, static: bool = True) -> Path:
    channels = channels_of(data)
    names = STATIC if static else ()
    form = PreparedMetadata(channels, names, {"temperature": "K"}, {"temperature": "t"}, "a test")
    group = zarr.create_group(path, attributes={METADATA_ATTRIBUTE: form.attributes()})
    fields = stacked(data, channels)
    _create(group, "fields", fields, chunk_rows)
    if static:
        _create(group, "static", np.stack([data[name].values for name in names]), chunk_rows)
    hours = (data["time"].values - np.datetime64("1900-01-01")) // np.timedelta64(1, "h")
    time = group.create_array("time", data=hours.astype("i8"))
    time.attrs["units"] = "hours since 1900-01-01"
    for name in ("latitude", "longitude"):
        group.create_array(name, data=data[name].values.astype("f8"))
    return path


def _create(group: zarr.Group, name: str, values: np.ndarray, chunk_rows: int) -> None:
    one = (1,) * (values.ndim - 3)
    channels, height, columns = values.shape[-3:]
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=(*one, channels, chunk_rows, columns),
        shards=(*one, channels, -(-height // chunk_rows) * chunk_rows, columns),
        compressors=(Crc32cCodec(),),
        dtype="f4",
        fill_value=np.nan,
        chunk_key_encoding={"name": "default", "separator": "."},
        config={"write_empty_chunks": True},
    )
    array[:] = values
