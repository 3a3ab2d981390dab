"""Small models, each with one form that real models have: of outputs, of code, of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.families import Family

SHAPE = (2, 3, 32, 16)
WIDTH = 8


def _own(name: str, model: type[nn.Module], *args: Any, shape: tuple[int, ...] = SHAPE) -> Family:
    return Family(name, "own", partial(model, *args), shape)


class _Stem(nn.Module):
    """A convolution before, and one after what a model is about."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.head = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.act(self.stem(x)))

    def act(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Coordinates(_Stem):
    """Multiplies by the latitude, which is made from the height."""

    def act(self, x: Tensor) -> Tensor:
        latitude = torch.linspace(90, -90, x.shape[-2], dtype=x.dtype, device=x.device)
        return x * latitude.deg2rad().cos()[:, None]


class TimeFilm(_Stem):
    """Scales channels by an embedding of the time, which is the same for all points."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 2 * WIDTH))

    def act(self, x: Tensor) -> Tensor:
        time = torch.tensor([0.1, 0.5, 0.2, 0.9], dtype=x.dtype, device=x.device)
        scale, shift = self.embed(time).view(2, 1, WIDTH, 1, 1)
        return F.layer_norm(x.movedim(1, -1), (WIDTH,)).movedim(-1, 1) * scale + shift


class ChannelExperts(_Stem):
    """Experts that a gate mixes at each point."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(WIDTH, 3, 1)
        self.experts = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))

    def act(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        best = weights.topk(2, dim=1)
        weights = torch.zeros_like(weights).scatter(1, best.indices, best.values)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be...,bec...->bc...", weights, outputs)


class ColumnGRU(_Stem):
    """A recurrence over the channels of each column, whose batch are the points."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 1, batch_first=True)

    def act(self, x: Tensor) -> Tensor:
        columns = x.permute(0, 2, 3, 1)
        y, _ = self.gru(columns.reshape(-1, WIDTH, 1))
        return x + y.reshape(columns.shape).permute(0, 3, 1, 2)


class ChannelsLast(_Stem):
    """Returns channels in the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.stem(x))).permute(0, 2, 3, 1)


class Tokens(_Stem):
    """Returns a token for each point."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.stem(x))).flatten(2).transpose(1, 2)


@dataclass
class Forecast:
    """A forecast and its spread."""

    mean: Tensor
    spread: Tensor
    name: str = "forecast"


class DataclassOutput(_Stem):
    """Returns a dataclass."""

    def forward(self, x: Tensor) -> Forecast:
        y = self.stem(x)
        return Forecast(self.head(y), F.softplus(self.head(y * y)).mean((-2, -1)))


class Pair(NamedTuple):
    """Fields and a scalar."""

    fields: Tensor
    loss: Tensor


class NamedOutput(_Stem):
    """Returns a named tuple with a scalar."""

    def forward(self, x: Tensor) -> Pair:
        y = self.head(torch.tanh(self.stem(x)))
        return Pair(y, F.mse_loss(y, x) + y.std())


class DictOutput(_Stem):
    """Returns a dict of levels."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.stem(x)
        return {"fine": self.head(y), "coarse": [F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 1)]}


class Checkpointed(_Stem):
    """Computes its block again in backward."""

    def act(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return torch.tanh(x - x.mean((-2, -1), keepdim=True))

        result: Tensor = checkpoint(block, x, use_reentrant=False)
        return result


class RowPositions(_Stem):
    """Adds a parameter with rows, and one with all points."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.latitude = nn.Parameter(torch.randn(1, WIDTH, rows, 1))
        self.point = nn.Parameter(torch.randn(WIDTH, rows, columns))

    def act(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.latitude) * self.point[None]


class PixelShuffled(_Stem):
    """Moves channels to rows and back, and adds patches that overlap."""

    def act(self, x: Tensor) -> Tensor:
        y = F.pixel_unshuffle(F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), 2)[:, ::4]
        patches = F.unfold(x, 3, padding=1) * 0.1
        return y + F.fold(patches, x.shape[-2:], 3, padding=1)


class Warped(_Stem):
    """Samples the fields at points that a network moves."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(WIDTH, 2, 3, padding=1)

    def act(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[-2:]
        axes = [torch.linspace(-0.9, 0.9, n, dtype=x.dtype) for n in (columns, rows)]
        grid = torch.stack(torch.meshgrid(*axes, indexing="xy"), -1)
        moved = grid + 0.05 * torch.tanh(self.flow(x)).permute(0, 2, 3, 1)
        return F.grid_sample(x, moved, align_corners=False)


class StandardisedWeights(nn.Conv2d):
    """A convolution that standardises its weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class OwnLayers(_Stem):
    """Layers of its own that call functions, among them a batch norm with its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = StandardisedWeights(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(WIDTH, WIDTH, 3, 1, 1))

    def act(self, x: Tensor) -> Tensor:
        norm = self.norm
        x = F.batch_norm(
            self.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training
        )
        return self.spectral(F.pad(x, (1, 1, 0, 0), mode="circular"))[..., 1:-1]


class GlobalResponse(_Stem):
    """Norms over all points and flips of rows."""

    def act(self, x: Tensor) -> Tensor:
        norm = x.norm(dim=(2, 3), keepdim=True)
        y = x * (norm / norm.mean(1, keepdim=True)) + x.flip(2)
        return y + torch.cat([x[:, :, 1:], x[:, :, -1:]], 2) - x.cumsum(2) / x.shape[2]


class Recurrent(_Stem):
    """Recurrences along rows, whose batch are the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def act(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 3, 2, 1)
        y, _ = self.lstm(rows.flatten(0, 1))
        return x + y.view(rows.shape).permute(0, 3, 2, 1)


class TransformerLayers(_Stem):
    """The transformer of torch on all points."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def act(self, x: Tensor) -> Tensor:
        return self.encoder(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


class Frozen(dict[str, int]):
    """A dictionary that forbids changes."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")

    clear = update


class FrozenSettings(_Stem):
    """Keeps its settings in a dictionary that forbids changes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Frozen(power=2)

    def act(self, x: Tensor) -> Tensor:
        return x ** self.settings["power"]


class TallWindows(_Stem):
    """Two windows of half the rows: of three ranks one has none. A convolution gets them so."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(WIDTH, WIDTH, 1)

    def act(self, x: Tensor) -> Tensor:
        batch, _, rows, columns = x.shape
        windows = x.view(batch, WIDTH, 2, rows // 2, columns).movedim(2, 1)
        y = windows.softmax(3).movedim(1, 2).reshape(x.shape)
        return self.mix(y)


class SlicesInPlace(_Stem):
    """Changes every other row in place."""

    def act(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :, ::2].mul_(2)
        return x


class Plain(nn.Sequential):
    """Layers with rules only."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.SiLU(),
            nn.MaxPool2d(2), nn.ConvTranspose2d(WIDTH, 3, 2, 2),
        )  # fmt: skip


FAMILIES = [
    _own("plain", Plain),
    _own("coordinates", Coordinates),
    _own("time_film", TimeFilm),
    _own("channel_experts", ChannelExperts),
    _own("column_gru", ColumnGRU),
    _own("channels_last", ChannelsLast),
    _own("tokens", Tokens),
    _own("dataclass_output", DataclassOutput),
    _own("named_output", NamedOutput),
    _own("dict_output", DictOutput),
    _own("checkpointed", Checkpointed),
    _own("row_positions", RowPositions, 32, 16),
    _own("pixel_shuffled", PixelShuffled),
    _own("warped", Warped),
    _own("own_layers", OwnLayers),
    _own("global_response", GlobalResponse),
    _own("recurrent", Recurrent),
    _own("transformer_layers", TransformerLayers),
    _own("frozen_settings", FrozenSettings),
    _own("tall_windows", TallWindows),
    _own("slices_in_place", SlicesInPlace),
]
