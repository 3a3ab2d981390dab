"""Functions that write in place to parts of a field, or fill tensors of their own."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, Cube, Model


def masked_windows(m, x):
    """Add a mask to part of the attention between windows, as Swin transformers do."""
    windows = F.pad(x, (0, 0, 0, -x.shape[2] % 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3)
    tokens = windows.flatten(1, 2)
    dots = tokens.mT @ tokens
    mask = m.matrix[:4, :4]
    dots[:, -COLUMNS:] += mask
    dots[:, COLUMNS - 1 :: COLUMNS] += mask.sin()
    return dots.softmax(-1), dots[:, -1] * 2


def rows_of_all_kinds(m, x):
    y = x * 1
    y[:, :, :3] *= 2
    y[:, :, -2:] += m.rows[:2]
    y[..., 1::2, 1:] -= x[..., 1::2, 1:].sin()
    y[:, 2:5, 1] *= m.scale[:3, None]
    y.select(2, -1).add_(m.rows[3])
    y.narrow(2, 1, 2).copy_(x[:, :, :2] * 3)
    y.narrow(-2, -2, 1)[:, 1:3].zero_()
    y[:, :, 1:][:, :, :2][:, 4:].mul_(3)
    y[:, :, :4][y[:, :, :4] > 1] = 0.5
    y[y < -1] *= 0.5
    torch.where(y > 0, y, y * 0.1, out=None)
    F.relu(y[:, 5:, :2], inplace=True)
    return y, y[:, :, :4] ** 2


def parts_that_are_read_later(m, x):
    y = x * 1
    first, rest = y[:, :, :2], y[:, :, 2:]
    row, again = y[:, :, 1], y.narrow(2, 1, 1)
    first.mul_(m.scale[:, None, None])
    a = (row * 2, again - 1)
    y[:, :, 1] += 1
    rest.add_(first[:, :, :1].detach())
    rest[:, 1, -1] = m.rows[0]
    return *a, first * 1, rest.cos(), row * again[:, :, 0], y


def folded_rows(m, x):
    y = x * 1
    tokens = y.flatten(2)
    tokens[:, :, 3:9] *= 2
    tokens.mT[:, -5:].add_(m.scale)
    merged = x.sin().transpose(1, 2).reshape(-1, CHANNELS, COLUMNS)  # a copy on one process, too
    merged[::2] = 0.5
    batch = y.flatten(0, 2)
    batch[1:-1:3] -= m.rows[0]
    return y, tokens * 1, merged.mean(0).expand(2, -1, -1), batch[2]


def windows(m, x):
    y = F.pad(x, (0, 0, 0, -x.shape[2] % 4))
    parts = y.view(2, CHANNELS, -1, 4, 3, 2).transpose(3, 4)
    parts[:, :, -1] *= 2
    parts[..., 0, :] += m.scale[:, None, None, None]
    y[:, :, ::3].mul_(3)
    return y, parts.sum(-2).flatten(3)


def views_of_views(m, x):
    y = x * 1
    y.permute(0, 2, 3, 1)[:, 1:3].mul_(m.scale)
    y.unsqueeze(0).squeeze()[..., :2, :].sub_(1)
    y.mT.view_as(y.mT)[..., -1].mul_(-2)
    y.diagonal(0, 2, 3).add_(m.scale[:, None])
    y.unfold(2, 2, 2)[:, :, 0].neg_()
    y.swapaxes(1, 2)[1, :2] = x.swapaxes(1, 2)[0, :2]
    y.expand(1, *y.shape)[0, :, 0, 1:3].copy_(m.rows[:2])
    return y


def parts_of_a_split(m, x):
    y = (x * 1).detach()  # autograd lets nobody write to one of several views
    y.unbind(2)[1][:, 3].fill_(2)
    y.split([2, x.shape[2] - 2], 2)[0].mul_(2)
    y.chunk(3, 2)[-1].exp_()
    y.tensor_split(2, 2)[1][:, 0] -= x[:, 0, -(x.shape[2] // 2) :].detach()
    return y * x


def results_that_are_views_or_copies(m, x):
    y = x * 1
    same, view, copy = y.contiguous(), y.reshape(2, 4, 2, -1, COLUMNS), y.mT.reshape(2, -1)
    view[:, 1].mul_(2)
    a = copy * 1
    same[:, :, :2].sub_(1)
    b = view * 2
    y.mT.contiguous()[..., :1].zero_()
    copy.zero_()
    flat = y.flatten(1)
    y.mul_(3)
    return a.view(x.shape), b.sum(1), y, flat.square().view(x.shape), view[:, 0].sin(), copy


def past_autograd(m, x):
    y = x * m.scale[:, None, None]
    z = y * 1
    with torch.no_grad():
        z[:, :, :3] *= 0.5
        z[:, :, 1].clamp_(-0.1, 0.1)
    part = z.detach()[:, 1:]
    part[:, :, 2:] += m.rows[2 : x.shape[2]]
    z.data[:, 0, :2] = 3
    z[:, 2:4, -2:].mul_(m.scale[0])
    return z.square(), part.sin(), y


def past_autograd_to_what_may_be_a_view(m, x):
    y = x * 1
    z = (x * m.scale[:, None, None]).sin()
    with torch.no_grad():
        y.reshape(2, -1).mul_(0.5)
        z.flatten(2)[:, :, 3:].add_(y.flatten(2)[:, :, 3:])
        z.contiguous()[:, 1].zero_()
    return y, z.square()


def views_that_outlive_their_source(m, x):
    y = x * 1
    view = y.reshape(2, 2, -1)
    first, second = view.detach(), view.reshape(4, -1).detach()
    view.mul_(2)
    z = y * 1
    first.add_(1)
    before = second + m.scale[2]
    del y, view
    first.add_(1)
    return z, first * m.scale[0], second * m.scale[1], before


def after_rows_have_moved(m, x):
    y = x[:, :, :5] * 2
    tokens = y.reshape(2, -1)
    y.add_(1)
    rolled = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, 0, 1, 1)).roll(1, 1)
    flat = rolled.flatten(1)
    rolled.mul_(m.scale)
    return tokens * 1, flat.sin(), rolled


def a_state_in_a_loop(m, x):
    state = torch.zeros_like(x)
    for i in range(x.shape[2]):
        state[:, :, i] += x[:, :, i] * m.scale[:, None]
        if i:
            state[:, :, i] += 0.5 * state[:, :, i - 1].clone()
    swapped = state.clone()
    swapped[:, :, :2], swapped[:, :, 2:4] = state[:, :, 2:4], state[:, :, :2]
    return state, swapped


def in_a_checkpoint(m, x):
    def block(y):
        y = y * m.scale[:, None, None]
        y[:, :, 1:3] *= y[:, :, :2].clone().sigmoid()
        return y.tanh()

    def with_view(y):
        y = y * m.scale[:, None, None]
        rows = y[:, :, :3]
        rows.mul_(2)
        return y, rows

    y, rows = checkpoint(with_view, x, use_reentrant=True)
    z, others = checkpoint(with_view, x, use_reentrant=False)
    both = checkpoint(block, x, use_reentrant=False) + checkpoint(block, x, use_reentrant=True)
    return both, y.sin(), rows.cos(), z.sin(), others.cos()


def clip(gradient):
    return gradient.clamp(-0.3, 0.3)


def double(gradient):
    return 2 * gradient


def with_hooks_before_writes(m, x):
    y, z, state = x * 1, x.sin(), x * 2
    view = y[:, :, :5]
    for tensor in (y, view, z, state):
        tensor.register_hook(clip)
    seen = view + 1  # the hook sees the gradient of this, and none of the write
    view.mul_(m.scale[:, None, None])
    part = z.permute(0, 2, 3, 1)[:, 1:]
    part[:, :2].register_hook(double)
    part[:, :4].add_(m.scale)
    other = state[:, :, 1] * 1
    state.mul_(3)
    state[:, :, 1:3] = y[:, :, 2:4]
    return seen.sum(2), view * 2, y.cos(), part.sin(), z, other, state


def with_hooks_after_writes(m, x):
    y, z = x * 1, x.sin()
    view = y[:, :, 1:4]
    y.mul_(2)
    y.register_hook(clip)
    view.grad_fn  # noqa: B018  (without it torch crashes, as what it views was written)
    view.register_hook(double)
    tokens = z.flatten(2).mT
    del z
    tokens.mul_(m.scale)
    tokens.register_hook(clip)
    return y, view * view, tokens.sin().mT.unflatten(2, x.shape[2:])


def with_hooks_of_what_is_read_and_written(m, x):
    views = [(factor * x)[:, :, :6] for factor in range(1, 6)]
    for view in views:
        view.register_hook(double)
    first, second, third, fourth, fifth = views
    first.copy_(first)
    second.add_(other=second, alpha=0.5)
    third[:, 1:3] = third[:, 2:4]
    fourth[:, 1:3] += fourth[:, 2:4] * 0.5
    fifth.lerp_(fifth, m.scale[0].detach())
    return [view.sin() for view in views]


def by_functions_that_save_their_results(m, x):
    results = []
    for y in (x, x.mean(2)):
        first, second, third = y * 1, y * 2, y * 3
        first[:, :3].tanh_()
        second.select(1, -1).sigmoid_()
        F.relu(third[:, 3:, 1:4], inplace=True)
        results += [first * 2, second * 2, third * 2]
    return results


def to_given_tensors(m, x):
    y = (x * 1).detach()
    torch.add(y, x.detach(), out=y[:, :, 1:3].new_zeros(x.shape))
    result = torch.empty_like(y)
    same = torch.where(y > 0, y, y * 2, out=result)
    part = result[:, :, :2]
    torch.mul(part, part, out=part)
    values, indices = torch.empty_like(y[:, 0]), torch.empty_like(y[:, 0], dtype=torch.long)
    torch.max(y, 1, out=(values, indices))
    return result + x, same is result and same, values, indices


def a_copy_without_gaps(m, x):
    y = x * 1
    column = y[..., 1].select(1, 3)
    same, copy = column.reshape(2, 1, -1), y[:1, 3, :, 1].ravel()
    column.mul_(m.scale[0])
    return same.expand(COLUMNS, 2, 1, -1).permute(1, 2, 3, 0), copy.expand(COLUMNS, -1).mT[None]


def repeated_entries(m, x):
    """An entry of memory that is shown several times changes in all places."""
    y, z = x * 1, x * 2
    flat, pair = y.reshape(-1), y.expand(2, *y.shape)
    pair[1:2, :, 1:3] = m.scale[0]
    members = z.expand(2, *z.shape).flatten(2)
    members[0, :, 5:].mul_(2)
    members[1:, 1:, 3] *= m.scale[1]
    tokens = y.expand_as(y[None]).reshape(-1, COLUMNS)
    tokens[3:7] = m.scale[2]
    row = z[:, :, :1].broadcast_to(z.shape)
    row[:, 1:3, 2:3] = m.scale[3]
    copies = y.expand(2, *y.shape).contiguous()
    copies[1, :, 2:].mul_(3)
    return pair[0] * 1, flat.view(x.shape), *members.view(2, *x.shape), y, row, *copies


def expanded_to_the_same_shape(m, x):
    """Nothing is repeated then, also past autograd."""
    y = x * 1
    y.expand(-1, -1, -1, -1).detach().mul_(2)
    same = y[:1].expand(1, -1, -1, -1).detach()
    same += m.scale[0].detach()
    return y * x, same


def results_of_a_function_of_the_users(m, x):
    """Some of fewer rows than ranks, which all ranks get."""
    y, row = Cube.apply(x), Cube.apply(x[:, :, :1])
    for z in (y, row):
        z.mul_(m.scale[0])
        z[..., :2] += x[:, :, 1:2, :2]
    return y, row * x


WRITTEN_HEIGHTS = {2: 7, 3: 13, 4: 9}
WRITES = [
    masked_windows,
    rows_of_all_kinds,
    parts_that_are_read_later,
    folded_rows,
    windows,
    views_of_views,
    parts_of_a_split,
    results_that_are_views_or_copies,
    past_autograd,
    past_autograd_to_what_may_be_a_view,
    views_that_outlive_their_source,
    after_rows_have_moved,
    a_state_in_a_loop,
    in_a_checkpoint,
    with_hooks_before_writes,
    with_hooks_after_writes,
    with_hooks_of_what_is_read_and_written,
    by_functions_that_save_their_results,
    to_given_tensors,
    a_copy_without_gaps,
    repeated_entries,
    expanded_to_the_same_shape,
    results_of_a_function_of_the_users,
]


def random_slice(size, rng):
    start = rng.randrange(size)
    return rng.choice(
        [
            slice(None),
            slice(start, rng.randint(start + 1, size)),
            slice(-rng.randint(1, size), None),
            slice(start % 2, None, 2),
        ]
    )


def random_view(y, rng):
    """Return a view of a tensor, or what may be one."""
    dim = rng.randrange(y.ndim)
    size = y.shape[dim]
    others = [d for d in range(y.ndim) if d != dim]
    views = [
        lambda: y[tuple(random_slice(size, rng) for size in y.shape)],
        lambda: y[..., rng.randrange(y.shape[-1])] if y.ndim > 1 else y.cos(),
        lambda: y.narrow(dim, size // 2, size - size // 2),
        lambda: y.select(dim, rng.randrange(-size, size)) if y.ndim > 1 else y.sin(),
        lambda: y.permute(*others, dim),
        lambda: y.flatten(max(0, y.ndim - 3), y.ndim - 2),
        lambda: y.reshape(-1, y.shape[-1]),
        lambda: y.unflatten(dim, (-1, 2)) if size % 2 == 0 else y.unsqueeze(dim),
        lambda: y.view(y.shape).detach(),
        lambda: y.contiguous(),
        lambda: y.ravel(),
        lambda: y.expand(2, *y.shape) if y.numel() < 2000 else y.mT,
        lambda: y * 2,
    ]
    return rng.choice(views)()


def write(y, other, w, rng):
    """Write to a tensor, or to part of it."""
    part = tuple(random_slice(size, rng) for size in y.shape)
    value = other.mean() + w[0]
    writes = [
        lambda: y.__setitem__(part, value),
        lambda: y[part].mul_(value),
        lambda: y.add_(value),
        lambda: y.copy_(other if other.shape == y.shape else value),
        lambda: y.masked_fill_(y.detach() > 0.5, 0.25),
        lambda: F.leaky_relu(y, 0.5, inplace=True),
        lambda: y.index_fill_(0, torch.tensor([0]), 0.5),
    ]
    write = rng.randrange(len(writes) + 2)
    if write < len(writes):
        writes[write]()
    elif write == len(writes):
        y[part] += value
    else:
        with torch.no_grad():
            y[part] *= 0.5


def random_program(seed, hooks=False):
    """Return a function that views and writes; the same at each call."""

    def run(m, x):
        rng = random.Random(seed)
        tensors = [x * 1]
        for i in range(6):
            tensors.append(random_view(rng.choice(tensors), rng))
            for _ in range(3 if hooks and i == 0 else 0):
                tensors.append(random_view(rng.choice(tensors[:2]), rng))
            if rng.random() < 0.3:
                tensors.pop(0)
            for y in tensors if hooks and i == 0 else ():
                if y.grad_fn is not None and rng.random() < 0.5:
                    y.register_hook(rng.choice([clip, double]))
            y, other = rng.choice(tensors), rng.choice(tensors)
            if y.ndim and y.numel():
                write(y, other, m.scale, rng)
        # Of any shape: sums tell, and what can be a field is compared entry by entry.
        fields = [y * 1 for y in tensors if y.ndim == 4 and y.shape[-2] > 4]
        return [*fields, *((y * y.detach().cos()).sum() for y in tensors)]

    return run


def empty(x, *shape):
    """Return a tensor of ones that the model makes, plain as no field takes part."""
    return torch.ones(shape or x.shape, dtype=x.dtype, device=x.device)


def slices_of_ones(m, x):
    y = empty(x)
    y[:, 0], y[:, :, :2] = m.scale[0], m.rows[:2]
    before = y * 2, y[:, 0].clone()
    y[..., :4] = x[..., :4] * 2
    y[:, 2:, :, 3:] = x[:, 2:, :, 3:].sin()
    return y, y * m.scale[:, None, None], *before


def rows_with_a_border(m, x):
    batch, channels, rows, columns = x.shape
    y = empty(x, batch, channels, rows + 2, columns + 2)
    y[:, :, 1:-1, 1:-1] = x
    y[:, :, 0] = m.scale[None, :, None]
    return y[:, :, :rows], y.sum((2, 3))


def sums_in_place(m, x):
    y, z = empty(x), x.new_zeros(x.shape)
    for i in range(3):
        y[:, i] += x[:, i + 1] * m.scale[i]
        y += x * i
    view = z[:, 1]
    view += x[:, 0]
    z[:, 2:] = x[:, 2:]
    view.mul_(m.scale[0])
    return y, z, view * 2


def steps_in_a_loop(m, x):
    y = torch.empty(3, *x.shape, dtype=x.dtype)
    for i in range(3):
        y[i] = x * m.scale[i]
    with torch.no_grad():
        z = empty(x).to(x.dtype)
        z[:, :4] = x[:, :4]
    return y.sum(0), y[1], z * x


def views_from_before(m, x):
    y = empty(x)
    views = y[:, :4], y.permute(0, 2, 3, 1), y[:, :, 1:3], y.reshape(2, -1), *y.chunk(2, 1)
    part = views[2][..., 0]
    views[0].copy_(x.detach()[:, :4])
    views[4].add_(x.detach()[:, 4:].exp())
    views[1][..., 0] *= 2
    views[2].mul_(3)
    part += 1
    views[3].mul_(2)
    return y * x, *(view * m.scale[0] for view in views), part * m.scale[:, None]


def modes_of_a_transform(m, x):
    spectrum = torch.fft.rfft2(x.permute(0, 2, 3, 1), dim=(1, 2), norm="ortho")
    spectrum = spectrum.unflatten(-1, (2, -1))
    weight = m.matrix[:4, :4].expand(2, 4, 4)
    parts = []
    for part in (spectrum.real, spectrum.imag):
        y = torch.zeros(part.shape, dtype=x.dtype)
        y[:, 1:, :3] = F.relu(torch.einsum("...bi,bio->...bo", part[:, 1:, :3], weight))
        parts.append(y)
    changed = torch.view_as_complex(torch.stack(parts, -1)).flatten(-2)
    kept = torch.zeros(changed.shape, dtype=changed.dtype)
    kept[:, :2], kept[:, -2:] = changed[:, :2], changed[:, -2:] * m.scale
    y = torch.fft.irfft2(kept, s=x.shape[-2:], dim=(1, 2), norm="ortho")
    return y.permute(0, 3, 1, 2)


def nodes_of_a_graph(m, x):
    tokens = x.flatten(2)
    target = torch.arange(tokens.shape[2]) % 5
    y = torch.zeros(2, CHANNELS, 5, dtype=x.dtype)
    y.index_add_(2, target, tokens * m.scale[:, None])
    return y, y[..., 0, None, None] * x


def filled_in_a_checkpoint(m, x):
    def block(x):
        y = empty(x)
        y[:, :3] = x[:, :3] * m.scale[:3, None, None]
        return y.sin()

    return checkpoint(block, x, use_reentrant=False) + checkpoint(block, x, use_reentrant=True)


def masks_of_points(m, x):
    """As land is masked, in all samples and channels."""
    land, high = m.rows[: x.shape[2]] > 0, x.detach()[0] > 1
    y, z = x * 2, x * 3
    of_channel = z[:, 1]
    y[:, :, land] = 0.5
    z[..., land] = 0
    z[:, high] = -1
    return y * z, of_channel.cos()


FILLS = [
    masks_of_points,
    slices_of_ones,
    rows_with_a_border,
    sums_in_place,
    steps_in_a_loop,
    views_from_before,
    modes_of_a_transform,
    nodes_of_a_graph,
]


def random_filling(seed):
    """Return a function that fills tensors with fields, through views of them or not."""

    def run(m, x):
        rng = random.Random(seed)
        source = x * m.scale[:, None, None]
        if rng.random() < 0.5:
            source = source.detach()
        tensors = [rng.choice([empty, torch.Tensor.new_zeros])(x, *x.shape) for _ in range(2)]
        for _ in range(6):
            if rng.random() < 0.7:
                tensors.append(random_view(rng.choice(tensors), rng))
            y = rng.choice(tensors)
            part = tuple(random_slice(size, rng) for size in y.shape)
            if y.shape == x.shape:
                writes = [
                    lambda y=y, part=part: y.__setitem__(part, source[part]),
                    lambda y=y: y.add_(source),
                    lambda y=y: y[:, 2].copy_(source[:, 1]),
                    lambda y=y: y[:, :, 1].mul_(source[:, :, 2]),
                    lambda y=y, part=part: y[part].add_(source[part]),
                ]
                rng.choice(writes)()
            elif y.ndim and y.numel():
                write(y, rng.choice(tensors), m.scale.detach(), rng)
        fields = [y * 1 for y in tensors if y.ndim == 4 and y.shape[-2] > 4]
        return [x * 1, *fields, *((y * m.scale[0] * y.detach().cos()).sum() for y in tensors)]

    return run


def runs_on_one_process(function, shape):
    """Return whether torch accepts a program, which may write to what autograd has saved."""
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    try:
        sum(y.sum() for y in Model(function).double()(x)).backward()
    except (RuntimeError, IndexError, UserWarning):
        return False
    return True
