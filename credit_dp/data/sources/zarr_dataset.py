"""A zarr group with one array per variable, as lazily read variables.

A chunk whose file is missing reads as the array's fill value: it may have been left out because all
of it is that value, or may be lost. Which of them is judged by the variable. Where the fill value
decodes to NaN, a chunk of a part of the globe is treated like any NaN, a chunk of the whole globe
is lost. Where it is zero, some fields may be zero all over a chunk; a pressure, temperature or wind
is not.
"""

import re
from typing import Any

import xarray as xr
import zarr

from credit_dp.data.disk import CountingStore, open_disk
from credit_dp.data.layout import HORIZONTAL, OTHER_NAMES
from credit_dp.data.sources.address import not_opened
from credit_dp.data.sources.complete import CompleteStore
from credit_dp.data.sources.intact import IntactStore
from credit_dp.variable_names import meaning, names_of_meaning

TIMES = {"time", *OTHER_NAMES["time"]}
GLOBE = {name for dim in HORIZONTAL for name in (dim, *OTHER_NAMES[dim])}
# Words of names of fields, one of several, that can be zero all over a chunk: at night, over land,
# in the dry.
ZERO = re.compile(
    r"(^|_)(precipitation|rain|snow|snowfall|snowmelt|hail|ice|cloud|radiation|solar|insolation|"
    r"runoff|evaporation|mask|cover|fraction|vegetation|lake|depth|reservoir|tp|cp|lsp|sf|sd|"
    r"siconc|lsm|tcc|lcc|mcc|hcc|clwc|ciwc|crwc|cswc|cc|ssrd|ssr|tsr|tisr|fdir|cape)(_|$)"
)


def open_dataset(where: str) -> tuple[xr.Dataset, CountingStore]:
    """The store at a path or address, version 2 or 3, consolidated or not, and its counter.

    Raises:
        UserError: there is nothing, or nothing that zarr can read.
    """
    disk = open_disk(where)
    try:
        group = zarr.open_group(disk, mode="r")
        consolidated = group.metadata.consolidated_metadata is not None
        arrays = dict(group.arrays())
        blosc = [name for name, array in arrays.items() if _is_blosc(array)]
        whole = [name for name, array in arrays.items() if _has_to_be_whole(name, array)]
        store = CompleteStore(IntactStore(disk, blosc), whole)
        # Without dask: it would add milliseconds to each read.
        dataset = xr.open_zarr(
            store, chunks=None, consolidated=consolidated, decode_timedelta=False
        )
    except Exception as error:
        raise not_opened(where, error) from error
    return dataset, disk


def _is_blosc(array: zarr.Array[Any]) -> bool:
    """Whether a chunk's file is a Blosc buffer."""
    codecs = array.compressors
    return array.shards is None and bool(codecs) and "Blosc" in type(codecs[-1]).__name__


def _has_to_be_whole(name: str, array: zarr.Array[Any]) -> bool:
    """Whether a missing chunk of an array can't have been left out on purpose."""
    if array.ndim < 2:  # coordinates are checked by their values
        return False
    fill = array.metadata.fill_value
    masks = [array.attrs.get(key) for key in ("_FillValue", "missing_value")]
    masked = fill is not None and (array.metadata.zarr_format == 2 or fill in masks)
    if masked or fill != fill:
        return _has_globes(array)
    zero = not fill and not array.attrs.get("add_offset")
    static_in_one = not TIMES & set(_dims(array)) and array.nchunks == 1
    names = (name, *names_of_meaning(meaning(name)))
    return static_in_one or not (zero and any(map(ZERO.search, names)))


def _has_globes(array: zarr.Array[Any]) -> bool:
    """Whether a file of the array holds whole fields: where one is missing, so is a whole field."""
    sizes = zip(_dims(array), array.shards or array.chunks, array.shape, strict=False)
    return all(chunk >= size for dim, chunk, size in sizes if dim in GLOBE)


def _dims(array: zarr.Array[Any]) -> list[str]:
    named = getattr(array.metadata, "dimension_names", None)
    return list(named or array.attrs.get("_ARRAY_DIMENSIONS", ()))  # type: ignore[arg-type]
