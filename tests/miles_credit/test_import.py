"""`credit-dp import credit`: its experiment trains, and no key is dropped silently."""

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
from torch import Tensor, nn

from credit_dp.cli.compose import Composer
from credit_dp.config import Config
from credit_dp.domain_parallel import verify_domain_parallel
from credit_dp.errors import UserError
from credit_dp.miles_credit.foreign_config import ForeignConfig
from credit_dp.plugins import PLUGINS_VARIABLE
from tests.cli.invocation import answer, forget_plugins
from tests.commands import run_line
from tests.data import stores

LEVELS = (60, 90)
UPPER = ("U", "T")
SURFACE = ("SP", "t2m")
GRID = (12, 24)
# Means and standard deviations of the variables that change in time.
MEANS = {
    "U": (10.0, 3.0),
    "T": (270.0, 9.0),
    "SP": (98000.0, 900.0),
    "t2m": (280.0, 9.0),
    "tsi": (1e6, 1e5),
    "total_precipitation": (1e-3, 1e-4),
}


def write_stores(folder: Path) -> None:
    """Write what a config of miles-credit names: a store for each year, and three other files."""
    random = np.random.default_rng(0)
    coords = {"latitude": np.linspace(82.5, -82.5, GRID[0]), "longitude": 15.0 * np.arange(GRID[1])}
    for year in (2000, 2001):
        times = np.datetime64(f"{year}-01-01", "ns") + stores.STEP * np.arange(12)
        fields: dict[str, Any] = {}
        for name, (mean, std) in MEANS.items():
            dims = stores.DIMS if name in UPPER else ("time", *coords)
            sizes = {"time": len(times), "level": len(LEVELS)}
            shape = [sizes.get(dim) or len(coords[dim]) for dim in dims]
            fields[name] = (dims, np.abs(random.normal(mean, std, shape)).astype("f4"))
        data = xr.Dataset(fields, {"time": times, "level": np.array(LEVELS), **coords})
        stores.write(data, folder / f"six_hourly_{year}.zarr")
    static = {name: (tuple(coords), random.normal(size=GRID)) for name in ("Z_GDS4_SFC", "LSM")}
    xr.Dataset(static, coords).to_netcdf(folder / "static.nc")
    for place, name in enumerate(("mean", "std")):
        table: dict[str, Any] = {
            each: ("level", np.full(2, values[place])) if each in UPPER else values[place]
            for each, values in MEANS.items()
        }
        xr.Dataset(table, {"level": np.array(LEVELS)}).to_netcdf(folder / f"{name}.nc")


MODEL: dict[str, Any] = {
    "type": "wxformer",
    "frames": 1,
    "image_height": GRID[0],
    "image_width": GRID[1],
    "levels": 2,
    "channels": 2,
    "surface_channels": 2,
    "input_only_channels": 3,
    "output_only_channels": 1,
    "dim": [8, 16],
    "depth": [1, 1],
    "dim_head": 8,
    "global_window_size": [2, 1],
    "local_window_size": 2,
    "cross_embed_kernel_sizes": [[2, 4], [2, 4]],
    "cross_embed_strides": [2, 2],
    "use_spectral_norm": False,
    "attn_dropout": 0.0,
    "ff_dropout": 0.0,
    "interp": False,
    "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [2, 2], "pad_lon": [4, 4]},
    "post_conf": {"activate": True, "skebs": {"activate": True}},
}


def credit_config(folder: Path) -> dict[str, Any]:
    """A config in the documented form of miles-credit, with one list for each kind of variable."""
    hourly = str(folder / "six_hourly_*")
    return {
        "save_loc": "/scratch/run",
        "seed": 7,
        "data": {
            "variables": list(UPPER),
            "save_loc": hourly,
            "surface_variables": list(SURFACE),
            "save_loc_surface": hourly,
            "dynamic_forcing_variables": ["tsi"],
            "save_loc_dynamic_forcing": hourly,
            "diagnostic_variables": ["total_precipitation"],
            "save_loc_diagnostic": hourly,
            "static_variables": ["Z_GDS4_SFC", "LSM"],
            "save_loc_static": str(folder / "static.nc"),
            "mean_path": str(folder / "mean.nc"),
            "std_path": str(folder / "std.nc"),
            "train_years": [2000, 2001],
            "valid_years": [2001, 2002],
            "scaler_type": "std_new",
            "history_len": 1,
            "valid_history_len": 1,
            "forecast_len": 1,
            "one_shot": True,
            "lead_time_periods": 6,
            "skip_periods": None,
            "static_first": True,
            "level_ids": list(LEVELS),
        },
        "model": dict(MODEL),
        "loss": {
            "training_loss": "mae",
            "use_latitude_weights": True,
            "latitude_weights": "/static.nc",
            "use_variable_weights": True,
            "variable_weights": {"T": [2, 2], "U": [1, 3], "Q500": 1},
        },
        "trainer": {
            "type": "era5-gen1",
            "mode": "none",
            "activation_checkpoint": True,
            "learning_rate": "1e-3",  # YAML reads this as text
            "weight_decay": 0,
            "train_batch_size": 2,
            "batches_per_epoch": 1,
            "epochs": 2,
            "use_scheduler": True,
            "scheduler": {
                "scheduler_type": "linear-warmup-cosine",
                "warmup_steps": 1,
                "total_steps": 2,
                "min_lr": 1e-05,
            },
            "grad_max_norm": "dynamic",
            "amp": False,
            "stopping_patience": 50,
        },
        "pbs": {"project": "X", "nodes": 1},
    }


def written(folder: Path, config: object, name: str = "their-run.yml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(config))
    return path


def import_config(
    monkeypatch: pytest.MonkeyPatch, folder: Path, config: object, *arguments: str
) -> str:
    """Import a config in a folder, and return what the command prints."""
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(folder)
        path = written(folder, config)
        words = ("import", "credit", str(path), *arguments)
        code, out, err = answer(monkeypatch, *words, program="credit-dp")
    assert (code, err) == (0, "")
    return out


def composed(folder: Path, *overrides: str) -> Config:
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(folder)
        return Composer("train").compose_config(["experiment=their-run", *overrides])


def refusal(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> str:
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(folder)
        code, out, err = answer(monkeypatch, "import", *words, program="credit-dp")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (folder / "conf").exists()
    return err.removeprefix("error: ").rstrip()


def test_the_experiment_has_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import_config(monkeypatch, tmp_path, credit_config(tmp_path))
    config = composed(tmp_path)
    data, model, trainer, optimizer = config.data, config.model, config.trainer, config.optimizer
    assert config.seed == 7
    assert data.store == [str(tmp_path / "six_hourly_*"), str(tmp_path / "static.nc")]
    assert data.statistics == [str(tmp_path / "mean.nc"), str(tmp_path / "std.nc")]
    assert (data.prognostic, data.diagnostic) == (["U", "T", "SP", "t2m"], ["total_precipitation"])
    assert (data.forcing, data.static) == (["tsi"], ["Z_GDS4_SFC", "LSM"])
    assert data.variable_config("LSM").normalise == "none"
    assert data.limits == {"Z_GDS4_SFC": None, "LSM": None}  # they have no unit any more
    assert data.variable_config("total_precipitation").accumulated is False
    assert data.dates.train == ["2000-01-01", "2000-12-31"]
    assert data.dates.valid == ["2001-01-01", "2001-12-31"]
    assert (data.step, data.grid, data.batch_size) == ("6h", "12x24", 2)
    assert (model.name, model.frames, model.residual) == ("crossformer", 1, False)
    sizes = vars(model)
    assert (sizes["channels"], sizes["groups"], sizes["head_channels"]) == ([8, 16], 8, 8)
    assert (sizes["local_windows"], sizes["global_windows"]) == ([2, 2], [2, 1])
    assert (sizes["poles"], sizes["activation_checkpointing"]) == ("earth", True)
    assert (trainer.steps, trainer.rollout, trainer.gradient_clip) == (2, {0: 2}, None)
    assert trainer.patience == 50
    assert (optimizer.lr, optimizer.weight_decay, optimizer.warmup_steps) == (1e-3, 0.0, 1)
    assert (optimizer.schedule, optimizer.final_lr) == ("cosine", 1e-5)
    weights = {"T": 2.0, "U_60": 1.0, "U_90": 3.0}  # of levels, if they differ
    assert (config.loss.name, config.loss.variable_weight) == ("mae", weights)
    assert (config.loss.latitude_weight, config.loss.tendency) == (True, False)


def test_each_key_without_counterpart_has_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = credit_config(tmp_path)
    config["trainer"]["brand_new_key"] = 3
    out = import_config(monkeypatch, tmp_path, config)
    lines = out.splitlines()
    keys = [line.split(":")[0].split("=")[0] for line in lines[:-2]]
    for key in (
        *("save_loc", "data.one_shot", "data.level_ids", "data.static_first"),
        *("model.post_conf.skebs.activate", "model.padding_conf.pad_lat"),
        *("trainer.brand_new_key", "trainer.train_batch_size", "loss.latitude_weights"),
        *("loss.variable_weights.Q500", "pbs.project", "pbs.nodes"),
    ):
        assert keys.count(key) == 1, key
    assert "trainer.brand_new_key=3: no counterpart: nothing here corresponds to it" in lines
    assert "pbs.nodes=1: no counterpart: credit-dp cluster script writes batch scripts" in lines
    assert lines[-1] == "train it: credit-dp train experiment=their-run"
    text = (tmp_path / "conf/experiment/their-run.yaml").read_text()
    assert all(f"# {line}\n" in text for line in lines[:-2])
    # Of all other keys there is a value in the experiment.
    assert len(keys) == len(set(keys))
    assert "data.train_years" not in keys
    assert [path.name for path in (tmp_path / "conf/experiment").iterdir()] == ["their-run.yaml"]


@pytest.mark.slow
def test_the_experiment_trains_on_their_stores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_stores(tmp_path)
    config = credit_config(tmp_path)
    del config["data"]["train_years"], config["data"]["valid_years"]  # of whole years
    import_config(monkeypatch, tmp_path, config)
    train = (Path(__file__).parents[2] / "train.py").read_text()
    (tmp_path / "train.py").write_text(train)
    line = (
        "python train.py experiment=their-run logger=csv parallel.domain=2 parallel.threads=1 "
        f"device=cpu data.cache={tmp_path}/cache run.dir=run trainer.validate_every=0 "
        "trainer.keep_best=false trainer.patience=null trainer.evaluate_hours=[6]"
    )
    done = run_line(line, tmp_path, os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run/metrics.csv").read_text().splitlines()) >= 2


@pytest.mark.slow
def test_sizes_of_a_model_that_is_not_used_are_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = credit_config(tmp_path)
    config["model"] |= {"channels": 5, "frames": 2}
    out = import_config(monkeypatch, tmp_path, config)
    assert "\nmodel.channels=5: differs: 2 channels, as the variables have" in out
    assert "\nmodel.frames=2: differs" in out


@pytest.mark.slow
def test_ensembles_become_those_of_this_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = credit_config(tmp_path)
    config["trainer"]["ensemble_size"] = 3
    config["loss"] = {"type": "ring-crps", "args": {"training_loss": "mse"}}
    out = import_config(monkeypatch, tmp_path, config)
    found = composed(tmp_path)
    assert (found.loss.name, found.trainer.members) == ("crps", 3)
    assert found.model.noise == 32
    assert "\ntrainer.ensemble_size=3: differs" in out


FLUXES = (
    *("total_precipitation", "evaporation", "top_net_solar_radiation", "top_net_thermal_radiation"),
    *("surface_net_solar_radiation", "surface_net_thermal_radiation"),
    *("surface_sensible_heat_flux", "surface_latent_heat_flux"),
)


def physics_config(folder: Path) -> dict[str, Any]:
    """A config with all fixers, in the form with one list for each kind of variable."""
    config = credit_config(folder)
    config["data"] |= {
        "variables": ["U", "V", "T", "specific_total_water"],
        "diagnostic_variables": list(FLUXES),
        "static_variables": ["geopotential_at_surface", "LSM"],
        "save_loc_physics": str(folder / "physics.nc"),
    }
    levels = {"lon_lat_level_name": ["lon2d", "lat2d", "coef_a", "coef_b"]}
    budget = {"activate": True, "denorm": True, "grid_type": "sigma", "midpoint": True, **levels}
    tracers = ["specific_total_water", "total_precipitation", "ozone"]
    config["model"] |= {
        **{"channels": 4, "output_only_channels": len(FLUXES)},
        "post_conf": {
            "activate": True,
            "skebs": {"activate": False, "alpha": 1.0},
            "tracer_fixer": {"activate": True, "tracer_name": tracers, "tracer_thres": [0, 0, 0]},
            "global_energy_fixer": budget,
            "global_water_fixer": budget,
            "global_mass_fixer": {**budget, "fix_level_num": 14},
        },
    }
    interfaces = {"coef_a": [0.0, 2e4, 0.0], "coef_b": [0.0, 0.3, 1.0]}
    xr.Dataset({name: ("half", x) for name, x in interfaces.items()}).to_netcdf(
        folder / "physics.nc"
    )
    return config


@pytest.mark.slow
def test_fixers_are_those_of_this_package_in_their_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = import_config(monkeypatch, tmp_path, physics_config(tmp_path))
    found = composed(tmp_path)
    assert found.model.fixers == ["nonnegative", "dry_air", "water", "energy"]
    assert found.data.hybrid == {"a": [0.0, 2e4, 0.0], "b": [0.0, 0.3, 1.0]}
    options = {name: found.data.variable_config(name) for name in found.data.diagnostic}
    # Sums over their step: what the budgets need.
    assert all(variable.accumulated is None for variable in options.values())
    assert options["total_precipitation"].nonnegative is True
    lines = [line for line in out.splitlines() if "post_conf" in line]
    assert sorted(line.split(":")[0] for line in lines) == [
        "model.post_conf.global_mass_fixer",
        "model.post_conf.tracer_fixer.tracer_name",  # no output is called ozone
    ]


@pytest.mark.slow
def test_a_fixer_without_its_variables_has_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = physics_config(tmp_path)
    config["data"]["static_variables"] = ["z_norm", "LSM"]
    (tmp_path / "physics.nc").unlink()
    out = import_config(monkeypatch, tmp_path, config)
    found = composed(tmp_path)
    assert found.model.fixers == ["nonnegative", "dry_air", "water"]
    assert found.data.variable_config("surface_latent_heat_flux").accumulated is False
    assert "\ndata.save_loc_physics=" in out
    assert "global_energy_fixer: no counterpart: model.fixers: energy needs geopotential_at" in out


@pytest.mark.slow
def test_fixers_after_the_model_are_found_by_their_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = physics_config(tmp_path)
    blocks = config["model"].pop("post_conf")
    arguments = {
        name: {key: value for key, value in block.items() if key not in ("activate", "denorm")}
        for name, block in blocks.items()
        if name.startswith("global")
    }
    for block in arguments.values():
        block["save_loc_physics"] = str(tmp_path / "physics.nc")
    tracers = ["ERA5/prognostic/3d/specific_total_water", "ERA5/diagnostic/2d/evaporation"]
    limits = {"tracer_thres": [0.0, -0.1], "tracer_thres_max": [0.1, 0.1]}
    config["postblocks"] = {
        "per_step": {
            "reconstruct": {"type": "reconstruct"},
            "clamp": {"type": "tracer_fixer", "args": {"tracer_vars": tracers, **limits}},
            "mass": {"type": "global_mass_fixer", "args": arguments["global_mass_fixer"]},
            "water": {"type": "global_water_fixer", "args": arguments["global_water_fixer"]},
        }
    }
    out = import_config(monkeypatch, tmp_path, config)
    model = composed(tmp_path).model
    assert model.fixers == ["bounds", "dry_air", "water"]
    assert model.bounds == {"specific_total_water": [0.0, 0.1], "evaporation": [-0.1, 0.1]}
    assert "postblocks.per_step.reconstruct.type" in out
    assert "postblocks.per_step.water" not in out


@pytest.mark.slow
def test_the_type_of_a_loss_is_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = credit_config(tmp_path)
    for kind in ("huber", "mae"):
        folder = tmp_path / kind
        folder.mkdir()
        import_config(monkeypatch, folder, config | {"loss": {"type": kind, "args": {}}})
        assert composed(folder).loss.name == kind


@pytest.mark.slow
def test_sources_with_roles_and_paths_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = credit_config(tmp_path)
    roles = {
        "prognostic": {"vars_3D": ["U", "T"], "vars_2D": ["SP", "t2m"], "path": "/era5_%Y*"},
        "diagnostic": {"vars_2D": ["total_precipitation"], "path": "/era5_%Y*"},
        "dynamic_forcing": {"vars_2D": ["tsi"], "path": "/era5_%Y*"},
        "static": {"vars_2D": ["Z_GDS4_SFC", "LSM"], "path": "/static.zarr"},
    }
    source = {"ERA5": {"dataset_type": "local", "levels": [60.0, 90.0], "variables": roles}}
    config["data"] = {
        "source": source,
        "start_datetime": "1979-01-01",
        "end_datetime": "2017-12-31 18:00:00",
        "timestep": "6h",
        "forecast_len": 2,
    }
    config["validation_data"] = {
        "source": source,
        "start_datetime": "2018-01-01",
        "end_datetime": "2018-12-31",
    }
    config["loss"] = {"type": "base", "args": {"training_loss": "mse", "var_weighting": "none"}}
    config["trainer"]["parallelism"] = {"data": "fsdp2", "tensor": 2, "domain": 4}
    scaled = ["ERA5/prognostic/3d/U", "T", "SP", "t2m", "total_precipitation", "tsi"]
    scaler = {"type": "bridgescaler_transform", "args": {"variables": scaled}}
    config["preblocks"] = {"per_step": {"scaler": scaler, "fill": {"type": "fill_values"}}}
    out = import_config(monkeypatch, tmp_path, config)
    found = composed(tmp_path, "parallel.domain=2")
    assert found.data.store == ["/era5_*", "/static.zarr"]
    assert found.data.levels == [60, 90]
    assert found.data.dates.train == ["1979-01-01", "2017-12-31T18:00"]
    assert found.data.dates.valid == ["2018-01-01", "2018-12-31"]
    assert found.trainer.rollout == {0: 2}
    assert found.parallel.data_mode == "fsdp2"
    assert (
        "parallel:\n  data_mode: fsdp2\n  domain: 4\n"
        in (tmp_path / "conf/experiment/their-run.yaml").read_text()
    )
    assert found.data.variable_config("LSM").normalise == "none"
    assert found.data.variable_config("tsi").normalise == "standard"
    for key in (
        "preblocks.per_step.fill.type",
        "preblocks.per_step.scaler.type",
        "trainer.parallelism.tensor",
        "loss.args.var_w",
    ):
        assert f"\n{key}" in f"\n{out}"
    assert "validation_data" not in out


def test_bad_values_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roles = {"variables": {"prognostic": {"vars_2D": ["SP"], "path": "/era5.zarr"}}}
    cases: list[tuple[str, object, str]] = [
        ("data.train_years", 2000, "data.train_years: needs [first year, year after the last]"),
        ("data.valid_years", ["a", "b"], "data.valid_years: needs [first year, year after the l"),
        ("loss.variable_weights", {"T": "heavy"}, "a value has not the form that miles-credit doc"),
        ("trainer.batches_per_epoch", float("nan"), "trainer.batches_per_epoch: needs a whole nu"),
        ("data.variables", {"U": 1}, "data.variables: needs a list of names, got "),
        ("data", {"variables": ["U"]}, "data.save_loc: needs the path of the data, got none"),
        ("trainer.learning_rate", "fast", "trainer.learning_rate: needs a number, got 'fast'"),
        ("trainer.epochs", 1.5, "trainer.epochs: needs a whole number, got 1.5"),
        ("model.dim", "wide", "model.dim: needs a whole number for each level"),
        ("model.cross_embed_kernel_sizes", [[3], [2]], "model.kernels: needs kernels of stride"),
        (
            "data",
            {"source": {"ERA5_0.25": roles}},
            "data.source: needs names of sources without a dot, got 'ERA5_0.25'",
        ),
        (
            "data",
            {"source": {"a": roles, "b": roles}},
            "data.source.b.variables.prognostic: needs names that no other source has",
        ),
    ]
    for key, value, needed in cases:
        config = credit_config(tmp_path)
        section, _, name = key.partition(".")
        if name:
            config[section][name] = value
        else:
            config[section] = value
        said = refusal(monkeypatch, tmp_path, "credit", str(written(tmp_path, config)))
        assert needed in said, (key, value, said)


def test_bad_files_and_arguments_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path, credit_config(tmp_path))
    (tmp_path / "broken.yml").write_text("a: [1\nb: }")
    (tmp_path / "code.yml").write_text("a: !!python/object/apply:os.system ['touch hacked']")
    (tmp_path / "list.yml").write_text("- 1")
    pickled = tmp_path / "pickled.pt"
    pickled.write_bytes(pickle.dumps(print))
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    for words, needed in {
        ("credit",): "credit-dp import credit: needs CONFIG.yml [CHECKPOINT], got none.",
        ("credit", "no.yml"): "no.yml: can't be read (No such file or directory).",
        ("credit", "broken.yml"): "broken.yml: is no config in YAML",
        ("credit", "code.yml"): "code.yml: is no config in YAML",
        ("credit", "list.yml"): "list.yml: needs a table of keys, got list.",
        ("credit", str(path), "--name", "a/b"): "--name: needs letters, digits, _ and -",
        ("credit", str(path), "no.pt"): "CHECKPOINT: there is no file no.pt.",
        ("credit", str(path), "pickled.pt"): "CHECKPOINT: pickled.pt can't be read as weights",
        ("credit", str(path), "empty.pt"): "CHECKPOINT: empty.pt has no table of weights",
        ("anemoi",): "credit-dp import: needs a command (credit), got 'anemoi'.",
    }.items():
        assert refusal(monkeypatch, tmp_path, *words).startswith(needed), words
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"frames": 2}, marks=pytest.mark.slow),
        pytest.param({"type": "graph"}, marks=pytest.mark.exhaustive),
        pytest.param(None, marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_without_counterpart_becomes_one_of_this_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any] | None
) -> None:
    config = credit_config(tmp_path)
    config["trainer"]["mode"] = "horovod"
    if change is None:
        del config["model"]
    else:
        config["data"]["history_len"] = change.get("frames", 1)
        config["model"] |= {"type": "fuxi"} | change
    out = import_config(monkeypatch, tmp_path, config)
    model = composed(tmp_path).model
    assert (model.name, model.frames) == ("unet", config["data"]["history_len"])
    assert ("model.type=" in out) == (change is not None)
    assert "trainer.mode=horovod: no counterpart" in out
    (tmp_path / "conf/experiment/their-run.yaml").unlink()
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(tmp_path)
        words = ("import", "credit", "their-run.yml", "checkpoint.pt")
        code, _, err = answer(monkeypatch, *words, program="credit-dp")
    assert code == 2
    assert ("data.history_len: needs 1" if change == {"frames": 2} else "model.type: needs") in err


def test_an_experiment_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import_config(monkeypatch, tmp_path, credit_config(tmp_path))
    path = tmp_path / "conf/experiment/their-run.yaml"
    before = path.read_text()
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(tmp_path)
        words = ("import", "credit", "their-run.yml")
        code, _, err = answer(monkeypatch, *words, program="credit-dp")
    assert code == 2
    assert "their-run.yaml exists. Remove it, or give another --name." in err
    assert path.read_text() == before


def test_a_key_below_one_that_was_read_has_no_line() -> None:
    config = ForeignConfig(Path("c.yml"), {"a": {"b": 1, "c": {"d": 2}}, "e": [1], "f": {}})
    config.read("a.c")
    config.remark("e", "differs: x")
    assert config.lines({"a": "because"}) == [
        "a.b=1: no counterpart: because",
        "e: differs: x",
        "f: no counterpart: nothing here corresponds to it",
    ]


def test_dates_of_yaml_are_text(tmp_path: Path) -> None:
    (tmp_path / "c.yml").write_text("a: 2000-01-08\nb: 2000\nc: 1.5\n")
    tree = ForeignConfig.load(tmp_path / "c.yml").tree
    assert tree == {"a": "2000-01-08", "b": 2000, "c": 1.5}


def test_a_config_can_not_read_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "a-password")
    config = credit_config(tmp_path)
    config["data"]["save_loc"] = "${oc.env:SECRET}"
    line = refusal(monkeypatch, tmp_path, "credit", str(written(tmp_path, config)))
    assert "data.store needs a plain value" in line
    assert "a-password" not in line


# ---------------------------------------------------------------- with a checkpoint


class TheirModel(nn.Module):
    """Stands for a model of the package `credit`: it has frames, windows and spectral norm."""

    def __init__(self, channels: int, levels: int, surface_channels: int, input_only_channels: int,
                 output_only_channels: int, dim: list[int], **others: Any) -> None:  # fmt: skip
        super().__init__()
        states = channels * levels + surface_channels
        self.embed = nn.Conv2d(states + input_only_channels, dim[0], 3, padding=1)
        nn.utils.parametrizations.spectral_norm(self.embed)
        self.head = nn.Conv2d(dim[0], states + output_only_channels, 1)
        # Nothing of the north may be taken for the south.
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.squeeze(2)
        b, c, h, w = x.shape
        windows = x.reshape(b, c, h // 2, 2, w // 2, 2).mean((3, 5), keepdim=True)
        x = x + windows.expand(b, c, h // 2, 2, w // 2, 2).reshape(b, c, h, w)
        north_to_south = torch.linspace(0, 1, h, dtype=x.dtype)[:, None]
        return self.head(self.embed(x)).add(self.slope * north_to_south).unsqueeze(2)


@pytest.fixture
def credit_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `credit` with the one function of miles-credit that the plug-in calls."""

    def load_model(conf: dict[str, Any]) -> nn.Module:
        arguments = dict(conf["model"])
        assert arguments.pop("type") == "wxformer"
        return TheirModel(**arguments)

    package, models = ModuleType("credit"), ModuleType("credit.models")
    models.load_model = load_model  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as modules, forget_plugins():
        modules.setitem(sys.modules, "credit", package)
        modules.setitem(sys.modules, "credit.models", models)
        yield


def their_model() -> TheirModel:
    torch.manual_seed(3)
    return TheirModel(**{key: value for key, value in MODEL.items() if key != "type"})


def import_checkpoint(
    monkeypatch: pytest.MonkeyPatch, folder: Path, state: object, **changes: Any
) -> str:
    torch.save(state, folder / "checkpoint.pt")
    config = credit_config(folder)
    config["data"] |= changes
    return import_config(monkeypatch, folder, config, str(folder))


def test_their_model_runs_with_its_weights_and_order_of_channels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credit_package: None
) -> None:
    theirs = their_model()
    named = {f"module.{name}": value for name, value in theirs.state_dict().items()}
    out = import_checkpoint(monkeypatch, tmp_path, {"epoch": 1, "model_state_dict": named})
    plugin = "conf/experiment/their-run.py"
    assert out.splitlines()[-1] == (
        f"train it: {PLUGINS_VARIABLE}={plugin} credit-dp train experiment=their-run"
    )
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path / plugin))
    config = composed(tmp_path)
    assert (config.model.name, config.model.residual) == ("credit", False)
    assert config.trainer.freeze == ["model.cube_embedding.*"]  # has no use without patches
    x = torch.randn(2, 9, *GRID)  # 6 states, tsi, 2 static fields
    ordered = torch.cat([x[:, :6], x[:, 7:], x[:, 6:7]], 1)  # static fields first
    theirs.eval()
    model = config.model.build(9, 7, GRID).eval()
    assert torch.equal(model(x), theirs(ordered[:, :, None])[:, :, 0])
    flipped = composed(tmp_path, "model.south_first=true").model.build(9, 7, GRID).eval()
    expected = theirs(ordered.flip(-2)[:, :, None])[:, :, 0].flip(-2)
    assert torch.equal(flipped(x), expected)
    assert not torch.equal(flipped(x), model(x))


@pytest.mark.slow
def test_their_static_fields_come_first_unless_a_config_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credit_package: None
) -> None:
    torch.save(their_model().state_dict(), tmp_path / "checkpoint.pt")
    config = credit_config(tmp_path)
    del config["data"]["static_first"]
    import_config(monkeypatch, tmp_path, config, str(tmp_path))
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path / "conf/experiment/their-run.py"))
    assert vars(composed(tmp_path).model)["static_channels"] == 2


@pytest.mark.slow
def test_their_model_is_sharded_unchanged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credit_package: None
) -> None:
    import_checkpoint(monkeypatch, tmp_path, their_model().state_dict(), static_first=False)
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path / "conf/experiment/their-run.py"))
    config = composed(tmp_path, "model.south_first=true")
    report = verify_domain_parallel(lambda: config.model.build(9, 7, GRID), (2, 9, *GRID), 3)
    assert report.passed, report.worst


def test_sizes_of_their_model_have_to_be_those_of_the_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credit_package: None
) -> None:
    torch.save(their_model().state_dict(), tmp_path / "checkpoint.pt")
    config = credit_config(tmp_path)
    config["model"]["channels"] = 5
    words = ("credit", str(written(tmp_path, config)), str(tmp_path))
    assert "model.channels: needs 2, as the variables have, got 5" in refusal(
        monkeypatch, tmp_path, *words
    )


@pytest.mark.slow
def test_what_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credit_package: None
) -> None:
    weights = their_model().state_dict()
    del weights["slope"]
    import_checkpoint(monkeypatch, tmp_path, weights)
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path / "conf/experiment/their-run.py"))
    config = composed(tmp_path)
    with pytest.raises(UserError, match=r"is not of this model .*slope") as error:
        config.model.build(9, 7, GRID)
    assert "\n" not in str(error.value)
    (tmp_path / "conf/experiment/their-run.safetensors").unlink()
    with pytest.raises(UserError, match=r"there is no file .*safetensors"):
        config.model.build(9, 7, GRID)
    monkeypatch.setitem(sys.modules, "credit.models", None)
    with pytest.raises(UserError, match="needs the package miles-credit"):
        config.model.build(9, 7, GRID)
