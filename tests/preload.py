"""Imports and plans in the fork server, so that forked ranks and commands need not.

A command imports hydra, rich, dask and matplotlib's figures late, which takes seconds each time.
Torch keeps what it learns: planning a model for the first time takes several times as long as
planning it again. Matplotlib keeps the fonts that it has read, and hydra its grammar and plug-ins.
"""

import importlib
import io
import pkgutil

import dask.array  # noqa: F401
import matplotlib.backends.backend_agg
import netCDF4  # noqa: F401
import PIL.Image
import torch
import torch.distributed.checkpoint.hf_storage
import torch.distributed.pipelining
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from matplotlib.figure import Figure

import credit_dp
import tests.plots  # noqa: F401
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.fields import Fields
from credit_dp.models import build_model
from tests.training.meshes import MODELS, ROWS
from tests.zoo.torchvision_operators import prepare_torchvision

COLUMNS = 16
FIELDS = Fields(((0, 1), (2, 3)), (4,), others=2)


def import_package() -> None:
    """Import every module of the package, and what hydra looks for."""
    for module in pkgutil.walk_packages(credit_dp.__path__, f"{credit_dp.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    Plugins.instance()
    OverridesParser.create().parse_overrides(["model=unet", "trainer.evaluate_hours=[6,24]"])
    PIL.Image.preinit()


def plan_and_train() -> None:
    """Plan each of the tiny models for two ranks, and take a step of it."""
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    for config in MODELS.values():
        model = build_model(config, FIELDS, (ROWS, COLUMNS)).double()
        x = torch.zeros(2, FIELDS.inputs, ROWS, COLUMNS, dtype=torch.float64)
        model(x).square().sum().backward()
        torch.optim.AdamW(model.parameters()).step()
        shard_model(model, manager, x.shape)


def draw() -> None:
    """Draw a figure with text on logarithmic axes."""
    figure = Figure()
    axis = figure.subplots()
    axis.loglog([1, 10], [1, 10], label="$10^1$")
    axis.set_title("title")
    axis.legend()
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure).print_png(io.BytesIO())


prepare_torchvision()
import_package()
draw()
with torch.random.fork_rng():
    plan_and_train()
