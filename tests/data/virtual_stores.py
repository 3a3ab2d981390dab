"""Icechunk repositories, and references to a netCDF file, made by the libraries of their users."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import xarray as xr


def repository(path: Path):
    import icechunk

    icechunk.set_logs_filter("error")
    return icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))


def write_tag(data: xr.Dataset, folder: Path) -> str:
    """Write a repository, and return the address of a tag."""
    made = repository(folder / "era5")
    session = made.writable_session("main")
    data.to_zarr(session.store, consolidated=False)
    made.create_tag("v1", session.commit("All times"))
    return f"{folder}/era5@tag.v1"


def write_netcdf(data: xr.Dataset, path: Path) -> Path:
    """Write one time in each chunk, compressed, with bytes shuffled."""
    encoding = {
        name: {
            "chunksizes": [1 if dim == "time" else array.sizes[dim] for dim in array.dims],
            "zlib": True,
            "shuffle": True,
        }
        for name, array in data.data_vars.items()
    }
    data.to_netcdf(path, engine="netcdf4", encoding=encoding)
    return path


def references(data: xr.Dataset, folder: Path) -> dict:
    """Write a netCDF file, and return kerchunk's references to it."""
    from kerchunk.hdf import SingleHdf5ToZarr

    path = write_netcdf(data, folder / "era5.nc")
    return SingleHdf5ToZarr(str(path), inline_threshold=100).translate()


def write_json(data: xr.Dataset, folder: Path) -> Path:
    path = folder / "era5.json"
    path.write_text(json.dumps(references(data, folder)))
    return path


def write_parquet(data: xr.Dataset, folder: Path) -> Path:
    return as_parquet(references(data, folder), folder / "era5.parq")


def as_parquet(made: dict, path: Path) -> Path:
    from kerchunk.df import refs_to_dataframe

    with warnings.catch_warnings():  # of pandas
        warnings.simplefilter("ignore")
        refs_to_dataframe(made, str(path), record_size=10)
    return path


def joined_json(files: Sequence[Path], path: Path, times: bool = False) -> Path:
    """Write references to netCDF files that follow each other in time, as kerchunk joins them.

    Args:
        files: of equal lengths in time, if `times`.
        path: of the references.
        times: leave the times in the files, too.
    """
    from kerchunk.combine import MultiZarrToZarr
    from kerchunk.hdf import SingleHdf5ToZarr

    with warnings.catch_warnings():  # of numpy, for early releases of kerchunk
        warnings.simplefilter("ignore")
        parts = [SingleHdf5ToZarr(str(file), inline_threshold=100).translate() for file in files]
    joined = MultiZarrToZarr(parts, concat_dims=["time"], coo_map={"time": "cf:time"}).translate()
    if times:
        parts = [SingleHdf5ToZarr(str(x), inline_threshold=0).translate()["refs"] for x in files]
        array = json.loads(parts[0]["time/.zarray"])
        array["shape"] = [len(files) * array["chunks"][0]]
        joined["refs"] |= {
            "time/.zattrs": parts[0]["time/.zattrs"],
            "time/.zarray": json.dumps(array),
        }
        joined["refs"] |= {f"time/{n}": part["time/0"] for n, part in enumerate(parts)}
    path.write_text(json.dumps(joined))
    return path


def write_icechunk(data: xr.Dataset, folder: Path) -> Path:
    """Write a netCDF file, and a repository with virtual chunks in it, as VirtualiZarr does."""
    return joined_icechunk([write_netcdf(data, folder / "era5.nc")], folder / "era5.icechunk")


def joined_icechunk(files: Sequence[Path], path: Path, times: bool = False) -> Path:
    """Write a repository with chunks in netCDF files that follow each other in time.

    Args:
        files: of equal lengths in time, if `times`.
        path: of the repository.
        times: leave the times in the files, too.
    """
    import icechunk
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr import open_virtual_dataset
    from virtualizarr.parsers import HDFParser

    registry = ObjectStoreRegistry({"file://": LocalStore()})
    options = {
        "parser": HDFParser(),
        "loadable_variables": [*([] if times else ["time"]), "latitude", "longitude", "level"],
    }
    with warnings.catch_warnings():  # of the codecs of HDF5
        warnings.simplefilter("ignore")
        parts = [open_virtual_dataset(f"file://{file}", registry, **options) for file in files]
    virtual = parts[0]
    if len(parts) > 1:
        virtual = xr.concat(parts, "time", data_vars="minimal", coords="minimal", compat="override")
    folder = path.parent
    made = repository(path)
    config = made.config
    store = icechunk.local_filesystem_store(str(folder))
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(f"file://{folder}/", store))
    made = made.reopen(config=config)
    made.save_config()
    session = made.writable_session("main")
    virtual.vz.to_icechunk(session.store)
    session.commit("References to netCDF")
    return path
