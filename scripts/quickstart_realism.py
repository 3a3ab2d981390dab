"""Builds the quickstart climate and prints the table of its realism in the docs.

`python scripts/quickstart_realism.py data.quickstart.truncation=42` measures the finer one; any key
under `data` may be given.
"""

import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import OmegaConf

from credit_dp.config import DataConfig
from credit_dp.data.grid import parse_grid
from credit_dp.data.quickstart import build
from credit_dp.data.quickstart.physical_fields import Realism, measure_realism

ERA5 = {"climatology": 816.0, 3: 936.0, 5: 1033.0}  # m2 s-2, WeatherBench
SETTINGS = Path(__file__).parents[1] / "conf" / "data" / "quickstart.yaml"


def main() -> None:
    """Build into a temporary folder, as in a first use, and measure the time."""
    config = read_config(sys.argv[1:])
    grid = parse_grid(config.grid) if config.grid else None
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.zarr"
        began = time.perf_counter()
        build(config.quickstart, grid, store)
        wall = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        dates = config.dates
        held_out = (dates.valid[0], dates.test[1])
        show(measure_realism(store, (dates.train[0], dates.train[1]), held_out))
    print(f"| time to make it | {wall:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU | |")


def read_config(overrides: list[str]) -> DataConfig:
    """The shipped settings with `overrides` such as `data.grid=64x128` applied."""
    known = OmegaConf.structured(DataConfig)
    shipped = OmegaConf.create(SETTINGS.read_text(encoding="utf-8"))
    shipped.pop("defaults")
    given = OmegaConf.from_dotlist(overrides).get("data", {})
    config = OmegaConf.to_object(OmegaConf.merge(known, shipped, given))
    if not isinstance(config, DataConfig):
        raise TypeError(f"the settings make a {type(config).__name__}")
    return config


def show(found: Realism) -> None:
    """Print a Markdown table."""
    rows = [
        ("jet at 200 hPa, north / south", f"{found.jet_north:.0f} / {found.jet_south:.0f} m/s", ""),
        ("Z500 standard deviation beyond 30 degrees", f"{found.deviation:.0f} m", ""),
        ("Z500 error of climatology", *_beside(found.climatology, ERA5["climatology"])),
    ]
    for days, error in found.persistence.items():
        rows.append((f"Z500 error of persistence, day {days}", *_beside(error, ERA5.get(days))))
        rows.append((f"its ratio to climatology's, day {days}", *_ratio(found, days)))
    print("| | quickstart | ERA5 |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def _beside(ours: float, theirs: float | None) -> tuple[str, str]:
    return f"{ours:.0f} m2/s2", f"{theirs:.0f} m2/s2" if theirs else ""


def _ratio(found: Realism, days: int) -> tuple[str, str]:
    era5 = f"{ERA5[days] / ERA5['climatology']:.2f}" if days in ERA5 else ""
    return f"{found.persistence[days] / found.climatology:.2f}", era5


if __name__ == "__main__":
    main()
