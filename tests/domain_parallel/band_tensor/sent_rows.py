"""Functions of fields, and how many rows all ranks send for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from credit_dp.models.blocks import pad_poles
from tests.domain_parallel.band_tensor.functions import CHANNELS

ROWS = 48


def conv(m, x, rows=3, stride=1):
    weight = m.matrix[:, :, None, None].expand(-1, -1, rows, 1)
    return F.conv2d(x, weight, stride=(stride, 1))


def joined(x, width, beyond):
    """Return `x` with what a function makes of the rows before each pole."""
    return torch.cat([beyond(x[..., :width, :]), x, beyond(x[:, :, -width:])], -2)


PADDED = {
    "zeros": lambda x: F.pad(x, (0, 0, 1, 1)),
    "a value": lambda x: F.pad(x, (0, 0, 1, 1), value=2.0),
    "reflect": lambda x: F.pad(x, (0, 0, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (0, 0, 1, 1), mode="replicate"),
    "slices": lambda x: joined(x, 1, lambda rows: -rows),
    "rolled slices": lambda x: joined(x, 1, lambda rows: rows.flip(-2).roll(3, -1)),
    "earth": lambda x: pad_poles(x, 1, "earth"),
    "new zeros": lambda x: joined(x, 1, lambda rows: x.new_zeros(rows.shape)),
    "cropped": lambda x: F.pad(F.pad(x, (0, 0, 2, 2)), (0, 0, -1, -1)),
}


def circular(m, x):
    return conv(m, F.pad(x, (0, 0, 1, 1), mode="circular"))


def wide(m, x, ranks):
    width = ranks - 1
    return conv(m, pad_poles(x, width, "earth"), rows=2 * width + 1)


def there_and_back(m, x):
    coarse = conv(m, pad_poles(x, 1, "reflect"), stride=2)
    return x * coarse.repeat_interleave(2, -2)


def shifted(m, x):
    order = torch.arange(2, ROWS + 2) % ROWS
    windows = x.index_select(2, order).unflatten(2, (-1, 4))
    mixed = (windows + windows.mean(3, keepdim=True)).flatten(2, 3)
    return x + mixed.index_select(2, (order - 4) % ROWS)


def shifted_bands(x):
    """Return a field whose bands end one row further south than those of layers."""
    return F.pad(x, (0, 0, 1, 1))[..., :ROWS, :]


def normed(m, x):
    return conv(m, F.pad(F.group_norm(shifted_bands(x), 2), (0, 0, 1, 1)))


def skip(m, x):
    both = torch.cat([shifted_bands(x), x], 1)
    total = both[:, :CHANNELS] + both[:, CHANNELS:]
    return total + conv(m, F.pad(total, (0, 0, 1, 1)))


def dilated(m, x, dilation):
    weight = m.matrix[:, :, None, None].expand(-1, -1, 3, 3) / 8
    return F.conv2d(x, weight, padding=dilation, dilation=dilation)


def product(coefficients, m, x):
    """Return products with a matrix that mixes all rows, and with its transpose."""
    table = torch.linspace(-1, 1, ROWS * coefficients, dtype=x.dtype).view(coefficients, -1).cos()
    spectrum = torch.einsum("bchw,gh->bcgw", x, table)
    return torch.einsum("bcgw,gh->bchw", spectrum, table)


class Sent(NamedTuple):
    """A function of fields, and what all ranks together send in a forward or backward of it."""

    function: Callable
    rows: float
    messages: int | None = None


def cases(ranks: int) -> dict[str, Sent]:
    """Return functions by name; each rank needs the row next to each edge of its band, say."""
    edges = 2 * (ranks - 1)
    padded = {
        name: Sent(lambda m, x, pad=pad: x + conv(m, pad(x)), edges, edges)
        for name, pad in PADDED.items()
    }
    # Each rank gets what others have of its channels, and returns it.
    moved = 2 * ROWS * (ranks - 1) / ranks
    return padded | {
        # The rank at the other pole sends rows, too.
        "circular": Sent(circular, 2 * ranks, 2 * ranks),
        "fewer rows than ranks stay at the poles": Sent(
            partial(wide, ranks=ranks), (ranks - 1) * edges, edges
        ),
        # Each coarse row is in the middle of three fine ones, of which the last band has two.
        "coarse rows lie where fine ones are": Sent(there_and_back, ranks - 1, ranks - 1),
        # Each rank gets two rows of the next one, and returns them.
        "shifted windows move there and back": Sent(shifted, 4 * ranks, 2 * ranks),
        "a norm returns the bands that it gets": Sent(normed, edges, ranks - 1),
        # The shifted rows return, and the convolution needs those next to its bands.
        "fields are joined in the bands of layers": Sent(skip, 1.5 * edges, 3 * (ranks - 1)),
        # Rows next to an edge once, whatever reads them, and in whatever order.
        "convolutions of one field": Sent(
            lambda m, x: sum(dilated(m, x, d) for d in (3, 1, 2)), 3 * edges
        ),
        "products over rows move bands to channels": Sent(partial(product, ROWS), moved),
        "products with fewer rows than ranks are summed": Sent(partial(product, ranks - 1), 0),
    }
