"""Every kind of layer once, with settings that move rows between bands."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from credit_dp.models.unet import LongRangeConv2d, PeriodicConv2d, PeriodicUpsample

SHAPE = (2, 6, 26, 8)  # rows that three bands share unevenly


class Branches(nn.Module):
    """Two convolutions that share an exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = (nn.Conv2d(6, 6, k, padding=k // 2) for k in (5, 3))

    def forward(self, x):
        return self.wide(x) + self.narrow(x)


# Convolutions, which small bands compute in another way than large ones.
CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "circular convolution": lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular"),
    "convolution across the poles": lambda: PeriodicConv2d(6, 6, poles="earth"),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "long": lambda: LongRangeConv2d(6, (5, 7)),
}
# What keeps the memory format channels last, of fields and of their gradients.
FORMAT_STAYS: dict[str, Callable[[], nn.Module]] = CONVOLUTIONS | {
    "strided": lambda: nn.Conv2d(6, 6, 3, padding=1, stride=2),
    "strided across the poles": lambda: PeriodicConv2d(6, 6, stride=2),
    "branches": Branches,
    "circular padding": lambda: nn.CircularPad2d(2),
    "reflection": lambda: nn.ReflectionPad2d(2),
    "zeros": lambda: nn.ZeroPad2d(2),
    "maximum": lambda: nn.MaxPool2d(2),
    "overlapping maximum": lambda: nn.MaxPool2d(3, 2, 1),
    "mean": lambda: nn.AvgPool2d(3, 2, 1),
    "batch norm": lambda: nn.BatchNorm2d(6),
    "instance norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "group norm": lambda: nn.GroupNorm(3, 6),
    "transposed": lambda: nn.ConvTranspose2d(6, 6, 4, 2, 1),
    "transposed without overlap": lambda: nn.ConvTranspose2d(6, 6, 2, 2),
    "transposed with gaps": lambda: nn.ConvTranspose2d(6, 6, 1, 2, output_padding=1),
    "upsampling around the globe": lambda: PeriodicUpsample("earth"),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "nearest to fewer rows": lambda: nn.Upsample((15, 16), mode="nearest-exact"),
    "bilinear": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "pixel shuffle": lambda: nn.Sequential(nn.Conv2d(6, 12, 1), nn.PixelShuffle(2)),
    "pixel unshuffle": lambda: nn.PixelUnshuffle(2),
}
LAYERS: dict[str, Callable[[], nn.Module]] = FORMAT_STAYS | {
    "reflected convolution": lambda: nn.Conv2d(6, 6, 5, padding=2, padding_mode="reflect"),
    "convolution wider than a band": lambda: nn.Conv2d(6, 6, 3, padding=12, dilation=12),
    "even kernel": lambda: nn.Conv2d(6, 6, 4, 2, 1, padding_mode="replicate"),
    "patches": lambda: nn.Conv2d(6, 6, 4, 4),
    "transposed rows": lambda: nn.Conv2d(6, 6, (51, 3), padding="same", groups=6),
    "crop": lambda: nn.ZeroPad2d((0, 0, -1, -2)),
    "power": lambda: nn.LPPool2d(2, 3, 2),
    "layer norm": lambda: nn.LayerNorm((26, 8)),
    "adaptive mean": lambda: nn.AdaptiveAvgPool2d((9, 4)),
    "adaptive maximum": lambda: nn.AdaptiveMaxPool2d((9, 4)),
    "root mean square norm": lambda: nn.RMSNorm((26, 8)),
    "local response": lambda: nn.LocalResponseNorm(3, alpha=0.5),
    "softmax": lambda: nn.Softmax(2),
    "log softmax": lambda: nn.LogSoftmax(2),
    "bicubic": lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"),
    "mean of the globe": lambda: nn.AdaptiveAvgPool2d(1),
    "maximum of the globe": lambda: nn.AdaptiveMaxPool2d(1),
}
WITHOUT_ROWS = ("mean of the globe", "maximum of the globe")
SOFTMAXES = ("softmax", "log softmax")  # torch keeps their output for backward
