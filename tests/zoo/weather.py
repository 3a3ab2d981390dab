"""Weather models after published designs, written as their authors would for one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from tests.zoo.families import Family

SHAPE = (2, 3, 32, 16)
WIDTH = 8


def _own(name: str, model: type[nn.Module], *args: Any, shape: tuple[int, ...] = SHAPE) -> Family:
    return Family(name, "own", partial(model, *args), shape)


class Mlp(nn.Sequential):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class SelfAttention(nn.Module):
    """Attention of tokens `(..., N, C)` to each other, with a bias for pairs of tokens."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "... n (t h d) -> t ... h n d", t=3, h=self.heads)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias
        return self.out(rearrange(scores.softmax(-1) @ v, "... h n d -> ... n (h d)"))


class TokenBlock(nn.Module):
    """A transformer's block on tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = SelfAttention(width), Mlp(width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """All patches and a class token attend to each other; the class modulates the fields."""

    def __init__(self, size: int = 4, rows: int = 32, columns: int = 16) -> None:
        super().__init__()
        self.size = size
        self.patch = nn.Linear(3 * size**2, 16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        count = rows // size * (columns // size)
        self.position = nn.Parameter(torch.randn(1, count + 1, 16))
        self.blocks = nn.ModuleList(TokenBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 3 * size**2)

    def forward(self, x: Tensor) -> Tensor:
        size, rows = self.size, x.shape[-2] // self.size
        tokens = rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=size, q=size)
        token = repeat(self.token, "1 1 d -> b 1 d", b=len(x))
        tokens = torch.cat([token, self.patch(tokens)], 1) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        token, tokens = tokens[:, :1], tokens[:, 1:]
        y = self.head(tokens * token.sigmoid())
        return rearrange(y, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=size, q=size)


def _shift_mask(rows: int, columns: int, window: int, shift: int) -> Tensor:
    """Return which pairs of tokens of a shifted window were not neighbours: minus infinity."""
    region = torch.zeros(rows, columns)
    parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for i, h in enumerate(parts):
        for j, w in enumerate(parts):
            region[h, w] = 3 * i + j
    tokens = rearrange(region, "(h p) (w q) -> (h w) (p q)", p=window, q=window)
    return (tokens[:, None] != tokens[:, :, None]).double() * -1e9


class Swin(nn.Module):
    """Windows that every other block shifts, with a mask made from the height."""

    def __init__(self, window: int = 4, depth: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.window = window
        self.stem, self.head = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)
        self.blocks = nn.ModuleList(TokenBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = rearrange(self.stem(x), "b c h w -> b h w c")
        return self.head(rearrange(self.mix(x), "b h w c -> b c h w"))

    def mix(self, x: Tensor) -> Tensor:
        window, (rows, columns) = self.window, x.shape[1:3]
        for i, block in enumerate(self.blocks):
            shift = window // 2 if i % 2 else 0
            mask = _shift_mask(rows, columns, window, shift)[None, :, None] if shift else None
            x = x.roll((-shift, -shift), (1, 2)) if shift else x
            tokens = rearrange(x, "b (h p) (w q) c -> b (h w) (p q) c", p=window, q=window)
            x = rearrange(
                block(tokens, mask),
                "b (h w) (p q) c -> b (h p) (w q) c",
                h=rows // window,
                p=window,
            )
            x = x.roll((shift, shift), (1, 2)) if shift else x
        return x


class CrossFormer(nn.Module):
    """Attention of near tokens in windows, then of tokens at regular distances."""

    def __init__(self, group: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.group = group
        self.embeddings = nn.ModuleList(
            nn.Conv2d(3, width // 2, kernel, 2, padding=(kernel - 2) // 2) for kernel in (2, 4)
        )
        self.near, self.far = TokenBlock(width), TokenBlock(width)
        self.head = nn.ConvTranspose2d(width, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        g = self.group
        x = torch.cat([embed(x) for embed in self.embeddings], 1)
        rows, columns = x.shape[-2:]
        near = rearrange(x, "b c (h p) (w q) -> b h w (p q) c", p=g, q=g)
        x = rearrange(self.near(near), "b h w (p q) c -> b c (h p) (w q)", p=g)
        far = rearrange(x, "b c (p h) (q w) -> b h w (p q) c", p=g, q=g)
        far = rearrange(self.far(far), "b h w (p q) c -> b c (p h) (q w)", p=g)
        return self.head(far.reshape(-1, far.shape[1], rows, columns))


class Pangu(nn.Module):
    """Windows of levels, rows and columns with a bias of their own for each level and latitude."""

    def __init__(self, window: tuple[int, int, int] = (2, 4, 4), rows: int = 16) -> None:
        super().__init__()
        self.window = window
        self.patch = nn.Conv3d(1, WIDTH, (1, 2, 2), (1, 2, 2))
        tokens = window[0] * window[1] * window[2]
        # One for each pair of windows of levels and of rows; the same at all longitudes.
        self.bias = nn.Parameter(torch.randn(2, -(-rows // window[1]), 2, tokens, tokens))
        self.blocks = nn.ModuleList(TokenBlock(WIDTH) for _ in range(2))
        self.head = nn.ConvTranspose3d(WIDTH, 1, (1, 2, 2), (1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x[:, None])
        levels, rows = x.shape[2:4]
        z, h, w = self.window
        x = F.pad(x, (0, 0, 0, -rows % h, 0, -levels % z))
        for i, block in enumerate(self.blocks):
            shift = tuple(-(size // 2) * i for size in self.window)
            x = x.roll(shift, (2, 3, 4))
            tokens = rearrange(x, "b c (Z z) (H h) (W w) -> b W Z H (z h w) c", z=z, h=h, w=w)
            tokens = block(tokens, self.bias)
            x = rearrange(tokens, "b W Z H (z h w) c -> b c (Z z) (H h) (W w)", z=z, h=h, w=w)
            x = x.roll([-s for s in shift], (2, 3, 4))
        return self.head(x[:, :, :levels, :rows]).squeeze(1)


class FourCastNet(nn.Module):
    """Mixes tokens by a filter of their two-dimensional spectrum, shared by blocks of channels."""

    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, 2)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)
        size = width // blocks
        self.filters = nn.Parameter(0.3 * torch.randn(2, blocks, size, size, 2))
        self.head = nn.Linear(width, 3 * 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        y = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho")
        y = y.reshape(*y.shape[:3], self.filters.shape[1], -1)
        first, second = torch.view_as_complex(self.filters)
        y = torch.einsum("bhwki,kij->bhwkj", y, first)
        y = torch.complex(F.relu(y.real), F.relu(y.imag))
        y = torch.einsum("bhwki,kij->bhwkj", y, second)
        y = torch.view_as_complex(F.softshrink(torch.view_as_real(y), 0.01)).flatten(3)
        x = x + torch.fft.irfft2(y, s=x.shape[1:3], dim=(1, 2), norm="ortho")
        y = self.head(x + self.mlp(x))
        return rearrange(y, "b h w (p q c) -> b c (h p) (w q)", p=2, q=2)


class FuXi(nn.Module):
    """Windows at half the resolution, between a strided convolution and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, 2, 1), nn.GroupNorm(2, WIDTH), nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        )  # fmt: skip
        self.swin = Swin(4, 2)
        self.up = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        mixed = self.swin.mix(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.up(torch.cat([y, mixed], 1))
        y = self.head(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.interpolate(y, x.shape[-2:], mode="bilinear")


class ConvLSTM(nn.Module):
    """A recurrence over the frames of the input, whose gates are convolutions."""

    def __init__(self, frames: int = 3, width: int = 4) -> None:
        super().__init__()
        self.width, self.frames = width, frames
        self.gates = nn.Conv2d(1 + width, 4 * width, 3, padding=1)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, rows, columns = x.shape
        hidden = torch.zeros(batch, self.width, rows, columns, dtype=x.dtype, device=x.device)
        cell = torch.zeros_like(hidden)
        for t in range(self.frames):
            gates = self.gates(torch.cat([x[:, t : t + 1], hidden], 1))
            i, f, o, g = gates.chunk(4, 1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
        return self.head(hidden)


class GraphCast(nn.Module):
    """Points send messages to a coarse mesh, which sends them to its neighbours, and back."""

    def __init__(self, rows: int = 32, columns: int = 16, width: int = WIDTH) -> None:
        super().__init__()
        index = torch.arange(rows * columns).view(rows, columns)
        to_mesh = (index // columns // 4) * (columns // 4) + index % columns // 4
        self.register_buffer("to_mesh", to_mesh.flatten())
        nodes = torch.arange(rows * columns // 16)
        pairs = [torch.stack([nodes, nodes.roll(step)]) for step in (1, -1, columns // 4)]
        self.register_buffer("edges", torch.cat(pairs, 1))
        self.encode, self.decode = nn.Linear(3, width), nn.Linear(2 * width, 3)
        self.edge, self.node = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, rows, columns = x.shape
        grid = self.encode(x.flatten(2).transpose(1, 2))
        nodes = int(self.to_mesh.shape[0]) // 16
        mesh = torch.zeros(batch, nodes, grid.shape[-1], dtype=x.dtype, device=x.device)
        mesh = mesh.index_add(1, self.to_mesh, grid)
        for _ in range(2):
            source, target = self.edges
            messages = F.silu(self.edge(torch.cat([mesh[:, source], mesh[:, target]], -1)))
            total = torch.zeros_like(mesh).index_add(1, target, messages)
            mesh = mesh + self.node(torch.cat([mesh, total], -1))
        y = self.decode(torch.cat([grid, mesh[:, self.to_mesh]], -1))
        return y.transpose(1, 2).reshape(batch, 3, rows, columns)


class Perceiver(nn.Module):
    """A few latent vectors read all points, attend to each other, and are read by all points."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 6, width))
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 3)
        self.read = nn.MultiheadAttention(width, 2, batch_first=True)
        self.think = TokenBlock(width)
        self.write = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        points = self.embed(x.flatten(2).mT)
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + self.read(latents, points, points, need_weights=False)[0]
        latents = self.think(latents)
        points = points + self.write(points, latents, latents, need_weights=False)[0]
        return self.head(points).mT.unflatten(2, x.shape[-2:])


class FNO(nn.Module):
    """Weights for the lowest modes of the spectrum, beside a pointwise path."""

    def __init__(self, modes: int = 5, width: int = 6) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.head = nn.Conv2d(5, width, 1), nn.Conv2d(width, 3, 1)
        self.local = nn.Conv2d(width, width, 1)
        self.weights = nn.ParameterList(
            torch.randn(width, width, modes, modes, 2) / width for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[-2:]
        axes = [torch.linspace(0, 1, n, dtype=x.dtype, device=x.device) for n in (rows, columns)]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).expand(len(x), -1, -1, -1)
        x = self.lift(torch.cat([x, grid], 1))
        spectrum = torch.fft.rfft2(x)
        m = self.modes
        low, high = map(torch.view_as_complex, self.weights)
        mixed = torch.zeros_like(spectrum)
        mixed[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], low)
        mixed[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], high)
        return self.head(F.gelu(torch.fft.irfft2(mixed, s=(rows, columns)) + self.local(x)))


class SphericalFNO(nn.Module):
    """A spectrum in longitude and matrices in latitude, as those of Legendre functions."""

    def __init__(self, rows: int = 32, degrees: int = 8, width: int = 6) -> None:
        super().__init__()
        self.lift, self.head = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)
        nodes = torch.linspace(-1, 1, rows, dtype=torch.float64)
        functions = torch.stack([torch.cos(n * torch.acos(nodes)) for n in range(degrees)])
        self.register_buffer("functions", functions)
        self.filters = nn.Parameter(torch.randn(width, width, degrees) / width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        spectrum = torch.view_as_real(torch.fft.rfft(x, dim=-1))
        degrees = torch.einsum("bchmr,nh->bcnmr", spectrum, self.functions)
        degrees = torch.einsum("bcnmr,cdn->bdnmr", degrees, self.filters)
        spectrum = torch.einsum("bdnmr,nh->bdhmr", degrees, self.functions).contiguous()
        y = torch.fft.irfft(torch.view_as_complex(spectrum), n=x.shape[-1], dim=-1)
        return self.head(F.gelu(x + y))


class AttentiveUNet(nn.Module):
    """A U-Net whose coarsest level has attention over all points."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = SelfAttention(2 * width)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.silu(self.stem(x))
        coarse = self.down(fine)
        tokens = self.norm(coarse).flatten(2).transpose(1, 2)
        coarse = coarse + self.attention(tokens).transpose(1, 2).reshape(coarse.shape)
        coarse = F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")
        return self.head(F.silu(self.up(torch.cat([coarse, fine], 1))))


class NoiseLevelUNet(nn.Module):
    """A denoiser whose blocks are scaled and shifted by an embedding of the noise level."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2 * width))
        self.norm = nn.GroupNorm(2, width)
        self.down, self.up = nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        level = x.pow(2).mean((1, 2, 3)).sqrt()  # of each sample
        angles = level[:, None] * torch.arange(1, 5, dtype=x.dtype, device=x.device)
        embedding = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        scale, shift = embedding[:, :, None, None].chunk(2, 1)
        fine = self.stem(x / (1 + level.view(-1, 1, 1, 1)))
        coarse = F.silu(self.norm(self.down(fine)) * (1 + scale) + shift)
        return self.head(torch.cat([fine, self.up(self.conv(coarse))], 1))


class VariableTokens(nn.Module):
    """A token for each variable and patch, which a learned query sums up by patch."""

    def __init__(self, size: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.size = size
        self.patches = nn.ModuleList(nn.Conv2d(1, width, size, size) for _ in range(3))
        self.query = nn.Parameter(torch.randn(1, 1, width))
        self.names = nn.Parameter(torch.randn(3, width))
        self.sum_up = nn.MultiheadAttention(width, 2, batch_first=True)
        self.block = TokenBlock(width)
        self.head = nn.Linear(width, 3 * size**2)

    def forward(self, x: Tensor) -> Tensor:
        batch, count = x.shape[:2]
        tokens = [patch(x[:, i : i + 1]) for i, patch in enumerate(self.patches)]
        rows = tokens[0].shape[-2]
        stacked = torch.stack([t.flatten(2).transpose(1, 2) for t in tokens], 2) + self.names
        stacked = stacked.flatten(0, 1)
        query = self.query.repeat(len(stacked), 1, 1)
        summed, _ = self.sum_up(query, stacked, stacked)
        y = self.head(self.block(summed.squeeze(1).unflatten(0, (batch, -1))))
        s = self.size
        return rearrange(y, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=s, q=s, c=count)


FAMILIES = [
    _own("vit", ViT),
    _own("swin", Swin),
    _own("swin_uneven", Swin, 7, 2, shape=(2, 3, 35, 14)),
    _own("crossformer", CrossFormer),
    _own("pangu", Pangu, shape=(1, 4, 32, 16)),
    _own("pangu_padded", Pangu, (2, 6, 4), shape=(1, 4, 32, 16)),
    _own("fourcastnet", FourCastNet),
    _own("fuxi", FuXi),
    _own("conv_lstm", ConvLSTM),
    _own("graphcast", GraphCast),
    _own("perceiver", Perceiver),
    _own("fno", FNO),
    _own("spherical_fno", SphericalFNO),
    _own("attentive_unet", AttentiveUNet),
    _own("noise_level_unet", NoiseLevelUNet),
    _own("variable_tokens", VariableTokens),
]
