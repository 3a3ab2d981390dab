"""The prepared store while it is made: begun under a temporary name, continued, then finished."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from zarr.storage import LocalStore

from credit_dp.checks import home_replaced
from credit_dp.data.prepared_form import ATTRIBUTE, EPOCH, TIME_UNITS
from credit_dp.data.preparing.asked import Asked
from credit_dp.data.preparing.codecs import shard_options
from credit_dp.data.preparing.files import ENDING, WholeFiles, remove_leftovers
from credit_dp.data.sources.source import Fields, Times
from credit_dp.errors import UserError

SETTINGS = "prepared"  # attribute with what the fields depend on, chunks and codec
FIELD_DIMS = ("channel", "latitude", "longitude")


@final
class Target:
    """`OUT` and `OUT.partial`.

    The shards are their own journal: one that is there is whole, so what is done is what is there.

    Args:
        out: where the prepared store is to be.
        overwrite: whether a prepared store that is there may be replaced.

    Raises:
        UserError: `out` can't be made, or is there.
    """

    def __init__(self, out: str, overwrite: bool) -> None:
        if not out or "://" in out:
            raise UserError(f"out: needs the path of a store to write, got {out!r}. Change out.")
        self.out = home_replaced("out", out).absolute()
        self.partial = self.out.with_name(self.out.name + ENDING)
        self._overwrite = overwrite
        self._new = self.out.with_name(f"{self.out.name}.new{ENDING}")
        self._old = self.out.with_name(f"{self.out.name}.old{ENDING}")
        folder = self.out.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            problem = "cannot be written in" if folder.is_dir() else "there is no such folder"
            raise UserError(f"{folder}: {problem}. Make it, or change out.")
        if self.out.exists() and not self._replaceable():
            known = ATTRIBUTE in (_attributes(self.out) or {})
            advice = ", or say overwrite=true" if known else ""
            raise UserError(f"{self.out}: is there already. Change out{advice}.")

    def settings(self) -> Mapping[str, Any] | None:
        """Those of the partial store; None if there is none.

        Raises:
            UserError: something else is in its place.
        """
        if not self.partial.exists():
            return None
        attributes = _attributes(self.partial)
        if attributes is None or SETTINGS not in attributes:
            raise UserError(
                f"{self.partial}: is no store that was being prepared. Move it, or change out."
            )
        settings: Mapping[str, Any] = attributes[SETTINGS]
        return settings

    def begin(self, asked: Asked, rows: int, codec: str, settings: Mapping[str, Any]) -> None:
        """Write all but the fields; the partial store is there with all of that, or not at all."""
        for leftover in (self._new, self.partial):
            shutil.rmtree(leftover, ignore_errors=True)
        self._new.mkdir()
        attributes = {ATTRIBUTE: asked.form.attributes(), SETTINGS: dict(settings)}
        group = zarr.create_group(LocalStore(self._new), attributes=attributes)
        group.create_array(
            "fields",
            shape=asked.shape,
            dimension_names=("time", *FIELD_DIMS),
            **shard_options(asked.shape, rows, codec),
        )
        _write_static(group, asked, rows, codec)
        _write_coordinates(group, asked)
        os.replace(self._new, self.partial)

    def resume(self) -> None:
        """Clean up behind what was killed."""
        remove_leftovers(self.partial / "fields")

    def missing(self, first: int, stop: int) -> list[int]:
        """The times from `first` up to `stop` that have no shard yet."""
        folder = self.partial / "fields"
        return [time for time in range(first, stop) if not (folder / shard_name(time)).exists()]

    def fields(self) -> "zarr.Array[Any]":
        """`(time, channel, latitude, longitude)` of the partial store, to write whole shards to."""
        array = zarr.open_array(
            WholeFiles(LocalStore(self.partial)), path="fields", mode="r+", zarr_format=3
        )
        # Opening ignores a config.
        return array.with_config({"write_empty_chunks": True})

    def finish(self) -> None:
        """Give the partial store its name; what had it is removed."""
        if self.out.exists():
            shutil.rmtree(self._old, ignore_errors=True)
            os.replace(self.out, self._old)
        os.replace(self.partial, self.out)
        shutil.rmtree(self._old, ignore_errors=True)

    def _replaceable(self) -> bool:
        """Only a prepared store is ever removed, and only if a user says so."""
        attributes = _attributes(self.out)
        return self._overwrite and attributes is not None and ATTRIBUTE in attributes


def shard_name(time: int) -> str:
    """The file in `fields` that holds a time."""
    return f"c.{time}.0.0.0"


def _attributes(folder: Path) -> Mapping[str, Any] | None:
    """Those of a zarr group of version 3; None if there is none."""
    try:
        metadata = json.loads((folder / "zarr.json").read_text())
        attributes: Mapping[str, Any] = metadata["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return attributes


def _write_static(group: zarr.Group, asked: Asked, rows: int, codec: str) -> None:
    if not asked.form.static:
        return
    values: Fields = asked.static()
    options = shard_options(values.shape, rows, codec)
    array = group.create_array(
        "static", shape=values.shape, dimension_names=("static", *FIELD_DIMS[1:]), **options
    )
    array[:] = values


def _write_coordinates(group: zarr.Group, asked: Asked) -> None:
    attributes: dict[str, dict[str, Any]] = {
        "time": {"units": TIME_UNITS, "calendar": "proleptic_gregorian", "standard_name": "time"},
        "latitude": {"units": "degrees_north", "standard_name": "latitude"},
        "longitude": {"units": "degrees_east", "standard_name": "longitude"},
    }
    values = {
        "time": hours_of(asked.times, asked.form.origin),
        "latitude": asked.latitude,
        "longitude": asked.longitude,
    }
    for name, numbers in values.items():
        group.create_array(
            name,
            data=np.ascontiguousarray(numbers),
            chunks=numbers.shape,
            compressors=None,
            dimension_names=(name,),
            attributes=attributes[name],
        )


def hours_of(times: Times, where: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Hours since `EPOCH`.

    Raises:
        UserError: a time is no whole hour.
    """
    hours = times.astype("M8[h]")
    odd = times[hours != times]
    if len(odd):
        raise UserError(
            f"{where}: a prepared store has whole hours, but there is {odd[0].astype('M8[s]')}. "
            "Choose other dates, or another data.step."
        )
    return (hours - EPOCH).astype(np.int64)
