"""Every kind of layer that mixes rows, in one plain model, as users write theirs."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from credit_dp.models.blocks import PolePad


class Block(nn.Module):
    """One branch whose result has the rows and columns of what it is added to."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + torch.tanh(self.layers(x))


class Excite(nn.Module):
    """Squeeze and excitation (Hu et al. 2018)."""

    def __init__(self, channels):
        super().__init__()
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.weigh = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.SiLU(), nn.Conv2d(4, channels, 1))

    def forward(self, x):
        return x * self.weigh(self.squeeze(x)).sigmoid()


class Zonal(nn.Module):
    """A convolution of zonal means, in one dimension."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 5, padding=2, padding_mode="replicate")

    def forward(self, x):
        return x + self.conv(x.mean(-1)).unsqueeze(-1)


class Deep(nn.Module):
    """A convolution in three dimensions, half of the channels taken for height."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1, padding_mode="circular")
        self.up = nn.ConvTranspose3d(2, 2, (1, 3, 1), padding=(0, 1, 0))

    def forward(self, x):
        deep = x.unflatten(1, (2, -1))
        return x + self.up(self.conv(deep)).flatten(1, 2)


class Tokens(nn.Module):
    """Channels last with an embedding of every place, norms over all of it and over channels."""

    def __init__(self, channels, grid):
        super().__init__()
        self.place = nn.Parameter(0.02 * torch.randn(1, *grid, channels))
        self.norm = nn.LayerNorm((*grid, channels))
        self.channel_norm = nn.RMSNorm(channels)

    def forward(self, x):
        tokens = self.norm(x.movedim(1, -1) + self.place)
        return x + self.channel_norm(tokens).movedim(-1, 1)


class Anomaly(nn.Module):
    """Functions of rows, taken from the package."""

    def forward(self, x):
        anomaly = x - x.mean((-2, -1), keepdim=True)
        shifted = anomaly.roll(3, -2)
        north = nn.functional.pad(anomaly, (0, 0, 2, -2), value=0.5)
        return anomaly + 0.1 * shifted + 0.1 * north


class Coarse(nn.Module):
    """Down by pools and strides and up again to the grid."""

    def __init__(self, channels, grid):
        super().__init__()
        self.down = nn.Sequential(
            nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
            nn.Conv2d(channels, channels, (4, 3), stride=(3, 2), padding=(2, 1), groups=2),
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            nn.ConvTranspose2d(channels, channels, (5, 4), (2, 2), (1, 1), (1, 0), dilation=(1, 1)),
            nn.AvgPool2d((3, 1), (1, 1), (1, 0), count_include_pad=False),
            nn.Upsample(scale_factor=1.7, mode="bicubic"),
            nn.InstanceNorm2d(channels, affine=True),
        )
        self.up = nn.Upsample(grid, mode="bilinear", align_corners=True)

    def forward(self, x):
        return x + self.up(self.down(x))


class OperatorZoo(nn.Module):
    """Maps `(B, in_channels, H, W)` to `(B, out_channels, H, W)`."""

    def __init__(self, channels, in_channels, out_channels, grid):
        super().__init__()
        self.stem = nn.Sequential(
            PolePad(2, "earth"),
            nn.Conv2d(in_channels, channels, 5),
            nn.GroupNorm(2, channels),
        )
        spectral = nn.utils.spectral_norm(nn.Conv2d(channels, channels, 3, padding=1))
        weighed = nn.Conv2d(channels, channels, (2, 3), padding="same", dilation=(2, 1))
        self.branches = nn.Sequential(
            Block(spectral, nn.Softmax(-2), parametrizations.weight_norm(weighed)),
            Block(nn.ReflectionPad2d((1, 1, 6, 4)), nn.Conv2d(channels, channels, (11, 3))),
            Block(nn.CircularPad2d((1, 1, 0, 0)), nn.Conv2d(channels, channels, 3, padding=(1, 0))),
            Block(nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
            Excite(channels),
            Zonal(channels),
            Deep(channels),
            Tokens(channels, grid),
            Anomaly(),
            Coarse(channels, grid),
        )
        self.head = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x):
        return self.head(self.branches(self.stem(x)))
