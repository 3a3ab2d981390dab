"""Simulates a fine quickstart climate and cuts a region out of it, for docs/regional.md.

`python scripts/make_region.py FOLDER` writes `FOLDER/climate.zarr`, a globe of 64x128 points, and
`FOLDER/box.zarr`, its North America and North Atlantic. `runs=2` and other settings of
`QuickstartConfig` change the climate.
"""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import xarray as xr

from credit_dp.config import QuickstartConfig
from credit_dp.data.quickstart import build
from credit_dp.files import atomic_path

# Other weather than the one of `data=quickstart`, which drives the region: T42 instead of T21.
CLIMATE = QuickstartConfig(truncation=42, seed=1, runs=8, run_days=150)
LATITUDE, LONGITUDE = slice(75, 20), slice(225, 358)  # degrees


def main() -> None:
    """Write both stores; a climate that is there is kept."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python scripts/make_region.py FOLDER [runs=2 ...]")
    folder, settings = Path(sys.argv[1]), dict(text.split("=") for text in sys.argv[2:])
    climate = folder / "climate.zarr"
    if not climate.exists():
        config = replace(CLIMATE, **{name: int(value) for name, value in settings.items()})
        build(config, None, climate, lambda title, share: print(f"{title} {share:.0%}"))
    with xr.open_zarr(climate) as globe, atomic_path(folder / "box.zarr") as temporary:
        box = globe.sel(latitude=LATITUDE, longitude=LONGITUDE).chunk(time=40)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            box.drop_encoding().to_zarr(temporary, zarr_format=3)


if __name__ == "__main__":
    main()
