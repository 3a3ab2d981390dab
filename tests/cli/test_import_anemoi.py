"""`credit-dp import anemoi`: its experiment trains, and no key is dropped silently."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from credit_dp.cli.compose import Composer
from credit_dp.cli.foreign_config import Experiment, ForeignConfig
from credit_dp.cli.import_anemoi import date_text, group_levels, read_anemoi
from credit_dp.cli.imports import check_composes
from credit_dp.config import Config, DiffusionConfig, StandardLossConfig
from credit_dp.data.channels import Channel
from credit_dp.errors import UserError
from credit_dp.training.loss import channel_weights
from tests.cli.invocation import answer
from tests.commands import run_line
from tests.data import anemoi_stores, stores

DATA = {"dataset_config": {"dataset": "${dataloader.dataset}", "frequency": "${data.frequency}"}}


def current_config() -> dict[str, Any]:
    """A composed config as anemoi-training documents it today."""
    return {
        "data": {
            "format": "zarr",
            "frequency": "6h",
            "datasets": {
                "data": {
                    "forcing": ["lsm", "z", "solar"],
                    "diagnostic": ["2t"],
                    "processors": {
                        "normalizer": {
                            "_target_": "anemoi.models.preprocessing.normalizer.InputNormalizer",
                            "config": {"default": "mean-std", "none": ["lsm"], "std": ["t"]},
                        }
                    },
                }
            },
        },
        "dataloader": {
            "dataset": "${system.input.dataset}",
            "prefetch_factor": 2,
            "pin_memory": True,
            "num_workers": {"training": 2, "validation": 8},
            "batch_size": {"training": 2, "validation": 4},
            "limit_batches": {"training": 1},
            "training": {"datasets": {"data": {**DATA, "start": None, "end": "2000-01-02"}}},
            "validation": {"datasets": {"data": {**DATA, "start": "2000-01-03T00", "end": 2000}}},
        },
        "system": {
            "input": {"dataset": "anemoi.zarr", "graph": None},
            "hardware": {"num_gpus_per_node": 4, "num_nodes": 2, "num_gpus_per_model": 4},
        },
        "task": {
            "_target_": "anemoi.training.tasks.Forecaster",
            "multistep_input": 2,
            "timestep": "6H",
            "rollout": {"start": 1, "epoch_increment": 2, "maximum": 3},
        },
        "model": {"num_channels": 512},
        "training": {
            "precision": "bf16-mixed",
            "accum_grad_batches": 2,
            "gradient_clip": {"val": 32.0, "algorithm": "value"},
            "training_loss": {
                "datasets": {
                    "data": {
                        "_target_": "anemoi.training.losses.MAELoss",
                        "scalers": ["pressure_level", "general_variable", "node_weights"],
                    }
                }
            },
            "scalers": {
                "datasets": {
                    "data": {
                        "general_variable": {
                            "_target_": "anemoi.training.losses.scalers.GeneralVariableLossScaler",
                            "weights": {"default": 1, "t": 6, "w": 0.1},
                        }
                    }
                }
            },
            "weight_averaging": {
                "_target_": "pytorch_lightning.callbacks.EMAWeightAveraging",
                "decay": 0.99,
            },
            "max_epochs": 4,
            "max_steps": 3,
            "optimization": {
                "lr": 1e-4,
                "optimizer": {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.99]},
                "lr_scheduler": {
                    "_target_": "timm.scheduler.CosineLRScheduler",
                    "lr_min": "3e-7",
                    "t_initial": "${training.max_steps}",
                    "warmup_t": 1,
                },
            },
        },
        "diagnostics": {"log": {"wandb": {"enabled": False}}},
    }


def imported(monkeypatch: pytest.MonkeyPatch, folder: Path, config: object) -> tuple[int, str, str]:
    """Import a config beside its dataset; return the exit code and what is printed."""
    (folder / "aifs.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(folder)
        return answer(monkeypatch, "import", "anemoi", "aifs.yaml", program="credit-dp")


def composed(folder: Path) -> Config:
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(folder)
        return Composer("train").compose_config(["experiment=aifs"])


def test_the_experiment_has_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    code, out, err = imported(monkeypatch, tmp_path, current_config())
    assert (code, err) == (0, "")
    config = composed(tmp_path)
    data, trainer, optimizer, loss = config.data, config.trainer, config.optimizer, config.loss
    assert (data.name, data.store, data.step) == ("anemoi", "anemoi.zarr", "6h")
    assert data.prognostic == ["temperature", "geopotential"]
    assert data.levels == [500, 850, 1000]
    assert (data.diagnostic, data.forcing, data.static) == (["2t"], ["solar"], ["lsm", "z"])
    assert data.variable_config("lsm").normalise == "none"
    assert data.variable_config("temperature").normalise == "std"
    assert data.dates.train == ["2000-01-01T00:00", "2000-01-02"]
    assert data.dates.valid == ["2000-01-03T00", "2000-01-03T18:00"]
    assert config.model.frames == 2
    assert config.parallel.domain == 4
    assert data.batch_size == 2 * 2 * 2  # of each copy, copies, accumulated
    assert (trainer.accumulate, trainer.steps) == (2, 3)
    # At the end of epochs 0 and 2.
    assert (trainer.rollout, trainer.rollout_unit) == ({0: 1, 1: 2, 3: 3}, "epoch")
    assert (trainer.autocast, trainer.gradient_clip) == ("bfloat16", None)
    assert optimizer.lr == pytest.approx(2e-4)
    assert (optimizer.final_lr, optimizer.warmup_steps, optimizer.ema) == (3e-7, 1, 0.99)
    assert (loss.name, loss.variable_weight) == ("mae", {"temperature": 6.0})
    assert (loss.latitude_weight, loss.level_weight, loss.tendency) == (True, True, False)
    keys = [line.split(":")[0].split("=")[0] for line in out.splitlines()]
    for key in (
        *("model.num_channels", "training.gradient_clip.val", "dataloader.pin_memory"),
        *("dataloader.num_workers.validation", "system.input.graph", "task._target_"),
        "training.scalers.datasets.data.general_variable.weights.w",
    ):
        assert keys.count(key) == 1, key


@pytest.mark.parametrize(
    ("scalars", "expected"),
    [(["variable"], {"temperature": 2.0, "geopotential": 3.0}), (["nothing"], {})],
)
def test_the_earlier_form_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scalars: list[str], expected: object
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    training = {
        "multistep_input": 1,
        "training_loss": {"_target_": "anemoi.training.losses.mse.WeightedMSELoss",
                          "scalars": scalars},
        "rollout": {"start": 1, "epoch_increment": 0, "max": 1},
        "max_steps": 9,
        "lr": {"rate": 1e-4, "iterations": 8, "min": 0.0, "warmup": 2},
        "variable_loss_scaling": {"default": 1, "pl": {"t": 2, "z": 3}},
    }  # fmt: skip
    config = {
        "data": {"frequency": "6h", "forcing": ["lsm", "z", "solar"], "diagnostic": []},
        "dataloader": {"training": {"dataset": {"dataset": "anemoi.zarr", "drop": ["2t"]}}},
        "training": training,
    }
    code, out, err = imported(monkeypatch, tmp_path, config)
    assert (code, err) == (0, "")
    found = composed(tmp_path)
    assert found.data.prognostic == ["temperature", "geopotential"]
    assert (found.trainer.steps, found.optimizer.warmup_steps) == (9, 2)
    assert (found.loss.name, found.loss.variable_weight) == ("mse", expected)
    assert "training.lr.iterations=8: differs: the cosine ends at trainer.steps" in out


def scaling_of_levels(kind: str, lowest: float, group: list[str]) -> dict[str, Any]:
    """Return the part of a config that weights variables and levels."""
    scalers = "anemoi.training.losses.scalers"
    return {
        "scalers": {
            "datasets": {
                "data": {
                    "general_variable": {
                        "_target_": f"{scalers}.GeneralVariableLossScaler",
                        "weights": {"default": 0.5, "t": 6, "2t": 0.1},
                    },
                    "pressure_level": {
                        "_target_": f"{scalers}.{kind}VariableLevelScaler",
                        "group": "pl",
                        "y_intercept": lowest,
                        "slope": 0.001,
                    },
                }
            }
        },
        "variable_groups": {"datasets": {"data": {"default": "sfc", "pl": {"param": group}}}},
    }


@pytest.mark.parametrize(
    ("kind", "lowest", "group", "expected"),
    [
        ("Relu", 0.7, ["t", "z"], {"temperature": 6 * 0.7, "geopotential": 0.5 * 0.7}),
        ("Linear", 0.2, ["t"], {"temperature": 6 * (0.2 + 0.5), "geopotential": 0.5}),
        ("Polynomial", 0.2, ["z"], {"temperature": 6.0, "geopotential": 0.5 * (0.2 + 0.25)}),
        ("No", 0.2, ["t", "z"], {"temperature": 6.0, "geopotential": 0.5}),
    ],
)
def test_levels_have_the_weights_of_the_scaler(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    lowest: float,
    group: list[str],
    expected: dict[str, float],
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    config = current_config()
    config["training"] |= scaling_of_levels(kind, lowest, group)
    code, out, err = imported(monkeypatch, tmp_path, config)
    assert (code, err) == (0, "")
    found = composed(tmp_path)
    assert found.loss.level_weight is False
    upper = [Channel(name, level) for name in expected for level in (500, 850, 1000)]
    weights = channel_weights(found.loss, (*upper, Channel("2t")))
    assert weights[[0, 3, 6]].tolist() == pytest.approx([*expected.values(), 0.1])
    for key in ("scalers.datasets.data.pressure_level", "variable_groups"):
        assert f"training.{key}" not in out


def ensemble_config() -> dict[str, Any]:
    """A config of AIFS-CRPS, with four members on two of eight GPUs."""
    config = current_config()
    config["system"]["hardware"] |= {"num_gpus_per_ensemble": 2, "num_gpus_per_model": 1}
    config["training"] |= {
        "method": {"_target_": "anemoi.training.train.methods.EnsembleTraining"},
        "ensemble_size_per_device": 2,
        "strategy": {"num_gpus_per_ensemble": 2, "num_gpus_per_model": 1},
        "training_loss": {
            "datasets": {
                "data": {
                    "_target_": "anemoi.training.losses.MultiscaleLossWrapper",
                    "multiscale_config": None,
                    "weights": [1.0],
                    "per_scale_loss": {
                        "_target_": "anemoi.training.losses.CRPS",
                        "scalers": ["general_variable", "node_weights", "stdev_tendency"],
                        "alpha": 0.9,
                    },
                }
            }
        },
    }
    return config


def test_an_ensemble_is_trained_on_the_same_score(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    code, out, err = imported(monkeypatch, tmp_path, ensemble_config())
    assert (code, err) == (0, "")
    found = composed(tmp_path)
    assert isinstance(found.loss, StandardLossConfig)
    assert (found.loss.name, found.loss.alpha) == ("crps", 0.9)
    # The score of errors divided by the standard deviation of tendencies, once, as theirs.
    assert found.loss.tendency is True
    assert "per_scale_loss.scalers" not in out
    assert (found.trainer.members, found.parallel.ensemble, found.parallel.domain) == (4, 2, 1)
    assert found.data.batch_size == 2 * 4 * 2  # of each ensemble, ensembles, accumulated
    assert found.optimizer.lr == pytest.approx(4e-4)
    assert getattr(found.model, "noise", 0) == 32
    assert "training.ensemble_size_per_device=2: differs: trainer.members=4" in out


def test_earlier_names_of_the_score_have_their_own_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    config = ensemble_config()
    config["training"]["training_loss"] = {
        "_target_": "anemoi.training.losses.kcrps.AlmostFairKernelCRPS",
        "scalers": ["general_variable", "node_weights", "var_tendency"],
    }
    scalers = config["training"]["scalers"]["datasets"]["data"]
    config["training"]["scalers"] = scalers  # without the names of datasets, as in 2025
    code, out, err = imported(monkeypatch, tmp_path, config)
    assert (code, err) == (0, "")
    found = composed(tmp_path)
    assert (found.loss.name, vars(found.loss)["alpha"]) == ("crps", 1.0)
    assert found.loss.variable_weight == {"temperature": 6.0}
    assert "training.training_loss.scalers: differs: loss.tendency divides differences" in out
    config["training"]["ensemble_size_per_device"] = 1
    config["system"]["hardware"]["num_gpus_per_ensemble"] = 1
    (tmp_path / "conf/experiment/aifs.yaml").unlink()
    assert imported(monkeypatch, tmp_path, config)[0] == 0
    assert composed(tmp_path).loss.name == "mse"


def test_a_diffusion_model_has_the_same_noise_levels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    config = current_config()
    config["task"]["rollout"] = {"start": 1, "epoch_increment": 0, "maximum": 1}
    loss = config["training"]["training_loss"]["datasets"]["data"]
    loss["_target_"] = "anemoi.training.losses.WeightedMSELoss"
    config["training"]["transport"] = {"objective": "edm_diffusion", "prediction_mode": "tendency"}
    config["training"]["optimization"]["optimizer"] = {
        "_target_": "torch.distributed.optim.ZeroRedundancyOptimizer",
        "optimizer_class": {"_target_": "torch.optim.AdamW", "_partial_": True},
        "eps": "1e-7",
    }
    sampling = {"schedule_type": "karras", "sigma_max": 90.0, "sigma_min": 0.03, "num_steps": 50}
    config["model"] = {
        "model": {
            "transport": {
                "objective": "edm_diffusion",
                "sigma_data": 0.9,
                "noise_channels": 16,
                "sigma_max": 100.0,
                "sigma_min": 0.03,
                "rho": 5.0,
                "training_condition": {"distribution": "karras", "sigma_max": 100.0},
                "inference_defaults": {
                    "sampling_schedule": sampling,
                    "sampler": {"sampler": "heun"},
                },
            }
        }
    }
    code, out, err = imported(monkeypatch, tmp_path, config)
    assert (code, err) == (0, "")
    found = composed(tmp_path)
    model = found.model
    assert isinstance(model, DiffusionConfig)
    assert (model.sigma_data, model.sigma_min, model.sigma_max, model.rho) == (0.9, 0.03, 100, 5)
    assert (model.sampling_steps, model.noise, model.residual) == (50, 16, True)
    assert found.loss.tendency is True
    assert "sampling_schedule.sigma_max=90.0: differs: give model.sigma_max to" in out
    # Those of torch, where a config names the optimizer without them.
    optimizer = vars(found.optimizer)
    assert (tuple(optimizer["betas"]), optimizer["eps"]) == ((0.9, 0.999), 1e-7)
    assert "optimizer._target_=torch.distributed.optim.ZeroRedundancyOptimizer: differs" in out
    assert "sampling_schedule.sigma_min" not in out


@pytest.mark.slow
def test_the_experiment_trains_on_the_dataset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    config = current_config()
    config["task"]["multistep_input"] = 1
    config["dataloader"]["validation"]["datasets"]["data"]["end"] = "2000-01-03T06"
    config["task"]["rollout"]["maximum"] = 1
    assert imported(monkeypatch, tmp_path, config)[0] == 0
    (tmp_path / "train.py").write_text((Path(__file__).parents[2] / "train.py").read_text())
    line = (
        "python train.py experiment=aifs model=unet_tiny logger=csv parallel.domain=2 device=cpu "
        f"parallel.threads=1 data.cache={tmp_path}/cache run.dir=run data.batch_size=4 "
        "trainer.steps=2 trainer.evaluate_hours=[6]"
    )
    done = run_line(line, tmp_path, os.environ)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_grid_that_cannot_be_read_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = stores.dataset()
    latitudes = np.repeat(data["latitude"].values, data.sizes["longitude"])
    arrays = {"latitudes": latitudes + np.linspace(0, 5, latitudes.size)}
    anemoi_stores.write(data, tmp_path / "anemoi.zarr", arrays=arrays, field_shape=None)
    code, out, err = imported(monkeypatch, tmp_path, current_config())
    assert (code, err) == (0, "")
    line = next(line for line in out.splitlines() if "can't be read here" in line)
    assert line.startswith("dataloader.training.datasets.data.dataset_config.dataset=")
    assert composed(tmp_path).data.static == ["lsm", "z"]


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({"dataloader": {"dataset": "nowhere.zarr"}}, "dataloader.dataset: nowhere.zarr"),
        ({"dataloader": {"dataset": ["a.zarr", "b.zarr"]}}, "combined ones can't be read"),
        ({"dataloader": {"dataset": {"join": ["a", "b"]}}}, "combined ones can't be read"),
        ({"dataloader": {"dataset": "${hardware.data}/x"}}, "can't be resolved"),
        ({"data": {"forcing": ["cp"]}}, "data.forcing: needs variables of anemoi.zarr, got 'cp'"),
        ({"training": {"max_steps": "many"}}, "training.max_steps: needs a number, got 'many'"),
        ({"data": {"frequency": "6 months"}}, "data.step: needs hours or days"),
    ],
)
def test_bad_configs_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], needed: str
) -> None:
    anemoi_stores.write(stores.dataset(), tmp_path / "anemoi.zarr")
    config = {"dataloader": {"dataset": "anemoi.zarr"}} | change
    code, out, err = imported(monkeypatch, tmp_path, config)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert needed in err
    assert not (tmp_path / "conf").exists()


def test_dates_of_yaml_are_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: 2000-01-08\nb: 2000\nc: 1.5\n")
    tree = ForeignConfig.load(tmp_path / "c.yaml").tree
    assert tree == {"a": "2000-01-08", "b": 2000, "c": 1.5}


@pytest.mark.parametrize(
    ("value", "first", "last"),
    [
        (2020, "2020-01-01", "2020-12-31"),
        ("2020-02", "2020-02-01", "2020-02-29"),
        ("2020-02-03", "2020-02-03", "2020-02-03"),
        (None, "", ""),
    ],
)
def test_a_year_or_month_ends_with_its_last_day(value: object, first: str, last: str) -> None:
    assert (date_text(value, is_last=False), date_text(value, is_last=True)) == (first, last)


def test_variables_share_levels_only_if_all_have_them() -> None:
    assert group_levels(["z_500", "2t", "t_500"]) == (["geopotential", "temperature", "2t"], [500])
    assert group_levels(["z_500", "t_850"]) == (["z_500", "t_850"], None)
    assert group_levels(["2t"]) == (["2t"], None)


@pytest.mark.parametrize(
    "value", ["${oc.env:SECRET}", "${oc.decode:${oc.env:SECRET}}", "${oc.${word}:SECRET}"]
)
def test_an_imported_config_can_not_read_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SECRET", "a-password")
    config = {"word": "env", "dataloader": {"dataset": value}}
    with pytest.raises(UserError, match="reads your environment") as refused:
        read_anemoi(ForeignConfig(Path("theirs.yaml"), config), "theirs", None)
    assert "a-password" not in str(refused.value)
    assert Composer("train").compose_config([]).data.cache.endswith("credit_dp")  # reads HOME


def test_an_experiment_is_written_with_plain_values() -> None:
    """`\\${...}` becomes `${...}` as it is resolved."""
    with pytest.raises(UserError, match=r"data\.store needs a plain value"):
        check_composes(Experiment({}, {"data.store": ["a", "${oc.env:SECRET}"]}), "theirs")
