"""Compare memory and traffic of other packages' models on 4 ranks with one process.

`python benchmarks/zoo.py` prints for each model the part of the activations that a rank saves for
backward, the bytes that it sends in a forward pass, and the functions that run whole. The tensors
are fake: nothing is computed, at the sizes of real images. It needs the extra `zoo`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planning.trace import use_fake_tensors
from credit_dp.domain_parallel.view.model import attached_view

RANKS = 4
GOAL = 0.35


@dataclass
class Saved:
    """The memory of tensors that autograd saves for backward, without parameters."""

    parameters: set[int]
    storages: dict[int, Tensor] = field(default_factory=dict)

    def pack(self, x: Tensor) -> Tensor:
        """Count a tensor, and keep it alive, so that no other tensor gets its memory."""
        key = x.untyped_storage()._cdata
        if key not in self.parameters:
            self.storages.setdefault(key, x)
        return x

    @property
    def bytes(self) -> int:
        """Return the size of all storages."""
        return sum(x.untyped_storage().nbytes() for x in self.storages.values())


@dataclass(frozen=True)
class Step:
    """The costs of a forward pass of one rank, or of one process.

    Attributes:
        saved: bytes that autograd saves.
        sent: bytes that the rank sends.
        conversion: `layers`, `view`, or `none` for one process.
        whole_calls: functions that ran whole -> number of calls.
    """

    saved: int
    sent: int = 0
    conversion: str = "none"
    whole_calls: dict[str, int] = field(default_factory=dict)


def measure(build: Callable[[], nn.Module], shape: tuple[int, ...], ranks: int) -> Step:
    """Return the costs of the second of `ranks` ranks; with one rank, those of one process."""
    model = build().train()
    local, transport = list(shape), None
    if ranks > 1:
        transport = CountingTransport(1, ranks)
        manager = DomainParallelManager(ranks, ranks, transport=transport)
        model = convert_to_domain_parallel(model, manager, input_shape=shape, whole_ops="allow")
        local[ROW_DIM] = manager.partition(shape[ROW_DIM]).sizes[1]
    with use_fake_tensors(model), torch.enable_grad():
        tensors = [*model.parameters(), *model.buffers()]
        saved = Saved({x.untyped_storage()._cdata for x in tensors})
        dtype = next(model.parameters()).dtype
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            model(torch.empty(local, dtype=dtype))
        size = saved.bytes
    if transport is None:
        return Step(size)
    view = attached_view(model)
    calls = {} if view is None else dict(view.whole_calls)
    sent = transport.sent[1].bytes
    return Step(size, sent, "layers" if view is None else "view", calls)


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, **settings)
    return model


def _smp(name: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    model: nn.Module = getattr(smp, name)(encoder, encoder_weights=None, classes=4)
    return model


SWIN = {"depths": (2, 2), "num_heads": (3, 6), "features_only": True}
# Name of a model, function that builds it, and its number of rows and columns.
MODELS: list[tuple[str, Callable[[], nn.Module], int]] = [
    ("smp Unet, ResNet18", partial(_smp, "Unet", "resnet18"), 256),
    ("smp Unet++, ResNet18", partial(_smp, "UnetPlusPlus", "resnet18"), 256),
    ("smp FPN, ResNet18", partial(_smp, "FPN", "resnet18"), 256),
    ("smp DeepLabV3+, ResNet18", partial(_smp, "DeepLabV3Plus", "resnet18"), 256),
    ("smp Unet, EfficientNet B0", partial(_smp, "Unet", "timm-efficientnet-b0"), 256),
    ("smp Segformer, MiT B0", partial(_smp, "Segformer", "mit_b0"), 256),
    ("timm ConvNeXt atto", partial(_timm, "convnext_atto", features_only=True), 256),
    ("timm EfficientNet B0", partial(_timm, "efficientnet_b0", features_only=True), 256),
    ("timm ResNet18", partial(_timm, "resnet18", features_only=True), 256),
    ("timm Swin", partial(_timm, "swin_tiny_patch4_window7_224", img_size=448, **SWIN), 448),
    ("timm Swin v2", partial(_timm, "swinv2_tiny_window8_256", img_size=256, **SWIN), 256),
    ("timm MaxViT", partial(_timm, "maxvit_nano_rw_256"), 256),
    ("timm ViT", partial(_timm, "vit_tiny_patch16_224", img_size=256), 256),
    ("timm DaViT", partial(_timm, "davit_tiny", features_only=True), 448),
]


def main(names: list[str]) -> None:
    """Print a line for each model."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.zoo.torchvision_operators import prepare_torchvision

    prepare_torchvision()
    print("| model | converted by | of the memory | sent | whole calls |")
    print("|---|---|---|---|---|")
    for name, build, size in MODELS:
        if names and not any(part.lower() in name.lower() for part in names):
            continue
        shape = (1, 3, size, size)
        one, rank = measure(build, shape, 1), measure(build, shape, RANKS)
        share = rank.saved / one.saved
        calls = ", ".join(f"{function} {count} x" for function, count in rank.whole_calls.items())
        verdict = "" if share <= GOAL else f" (**goal {GOAL}**)"
        cells = (
            name,
            rank.conversion,
            f"{share:.2f}{verdict}",
            f"{rank.sent / 1e6:.1f} MB",
            calls,
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
