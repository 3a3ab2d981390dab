"""Icechunk repositories, and references to a netCDF file, made by the libraries of their users."""

import json
import warnings
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
    from kerchunk.df import refs_to_dataframe

    path = folder / "era5.parq"
    made = references(data, folder)
    with warnings.catch_warnings():  # of pandas
        warnings.simplefilter("ignore")
        refs_to_dataframe(made, str(path), record_size=10)
    return path


def write_icechunk(data: xr.Dataset, folder: Path) -> Path:
    """Write a netCDF file, and a repository with virtual chunks in it, as VirtualiZarr does."""
    import icechunk
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr import open_virtual_dataset
    from virtualizarr.parsers import HDFParser

    url = f"file://{write_netcdf(data, folder / 'era5.nc')}"
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    coordinates = [str(name) for name in data.coords]
    with warnings.catch_warnings():  # of the codecs of HDF5
        warnings.simplefilter("ignore")
        virtual = open_virtual_dataset(
            url, registry=registry, parser=HDFParser(), loadable_variables=coordinates
        )
    path = folder / "era5.icechunk"
    made = repository(path)
    config = made.config
    store = icechunk.local_filesystem_store(str(folder))
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(f"file://{folder}/", store))
    made = made.reopen(config=config)
    made.save_config()
    session = made.writable_session("main")
    virtual.vz.to_icechunk(session.store)
    session.commit("References to era5.nc")
    return path
