"""Tables of functions of fields `f(model, x)` that have to equal one process on bands.

`model` is that of `functions.Model`, `x` of shape (2, CHANNELS, rows, COLUMNS).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, PLAIN, dim_of_bands


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def image(tokens, x):
    return tokens.transpose(1, 2).reshape(x.shape)


def heads(x):
    """Return `(B, heads, tokens, features)` with rows among the tokens."""
    return tokens(x).unflatten(-1, (2, 4)).transpose(1, 2)


SDPA = F.scaled_dot_product_attention


def several_heads(x, count):
    """Return `(B, count, tokens, 2)` with rows among the tokens."""
    return tokens(x)[..., : 2 * count].unflatten(-1, (count, 2)).transpose(1, 2)


def attend_in_heads(model, x):
    """Attention with as many heads as ranks, or samples: each rank computes some."""
    four, three = several_heads(x, 4), several_heads(x, 3)
    return (
        SDPA(four, four.flip(2), four * 2),
        SDPA(three, three.flip(2), three * 2, scale=0.3),
        SDPA(four.flatten(0, 1), four.flip(2).flatten(0, 1), (four * 2).flatten(0, 1)),
        SDPA(four[:1], four[1:], tokens(x)[:1].unflatten(-1, (4, 2)).transpose(1, 2)),
        SDPA(three[:1], three[1:], three[:1].repeat(1, 1, 1, 4)),
    )


def attend_in_heads_with_masks(model, x):
    four = several_heads(x, 4)
    count = four.shape[2]
    mask = torch.linspace(-1, 1, count * count, dtype=x.dtype).view(count, count)
    of_heads = mask * model.matrix[:4, 0, None, None]
    return (
        SDPA(four, four.flip(2), four, attn_mask=mask > -0.9),
        SDPA(four, four.flip(2), four, attn_mask=of_heads),
        SDPA(four[:1], four[:1].flip(2), four[1:], attn_mask=of_heads[:, :1]),
        SDPA(four[:1], four[:1].flip(2), four[1:], is_causal=True),
        SDPA(four[:1, :2], four[:1, 2:], four[1:, 2:], is_causal=True),
    )


def attend_to_other_rows(model, x):
    """Attention with fewer or more keys than queries, whose bands are others."""
    four = several_heads(x, 4)
    return (
        SDPA(
            four, four[:, :, ::2], four[:, :, 1::2] if len(four[0, 0]) % 2 == 0 else four[:, :, ::2]
        ),
        SDPA(four[:, :, 4:-3], four, four * 2),
        SDPA(four, four[:, :, :5], four[:, :, -5:]),
    )


def attend(x, **options):
    q = heads(x)
    return SDPA(q, q.flip(2), q * 2, **options)


def attend_with_mask(model, x):
    count = x.shape[2] * x.shape[3]
    mask = torch.linspace(-1, 1, count * count, dtype=x.dtype).view(count, count)
    return attend(x, attn_mask=mask), attend(x, attn_mask=mask > -0.9)


def attend_by_columns(model, x):
    y = x.permute(0, 2, 3, 1)
    return SDPA(y, y, y), SDPA(y, y[:, :, :2], y[:, :, :2], is_causal=True, scale=0.3)


def attend_by_heads(model, x):
    y = x.transpose(1, 2)
    mask = model.rows[: x.shape[2], 0].view(-1, 1, 1)
    return SDPA(y, y, y), SDPA(y, y, y, attn_mask=mask)


def grouped_queries(model, x):
    q = heads(x)
    return SDPA(q, q[:, :1], q[:, 1:], enable_gqa=True)


def attend_class(model, x):
    q = model.matrix[None, None, :3, :4].expand(2, 2, 3, 4)
    return SDPA(q, heads(x), heads(x) * 2), SDPA(q, heads(x), heads(x), scale=0.1)


def multi_head(model, x, **options):
    y = x.flatten(2).permute(2, 0, 1)
    return model.attention(y, y, y, **options)


def multi_head_with_masks(model, x):
    y = x.flatten(2).permute(2, 0, 1)
    count = len(y)
    mask = torch.ones(count, count, dtype=torch.bool).triu(1)
    padding = torch.arange(count)[None].expand(2, -1) > count - 3
    return (
        model.attention(y, y, y, attn_mask=mask)[0],
        model.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0],
        model.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0],
    )


def multi_head_with_class(model, x):
    y = x.flatten(2).permute(2, 0, 1)
    y = torch.cat([model.scale.expand(1, 2, -1), y])
    y = y + model.attention(y, y, y, need_weights=False)[0]
    query = y[:1]
    return y[0], model.attention(query, y[1:], y[1:], need_weights=False)[0]


def multi_head_of_windows(model, x):
    y = x.permute(3, 0, 2, 1).flatten(1, 2)  # columns attend, rows are samples
    return model.attention(y, y, y)


def encode(model, x):
    return image(model.encoder(tokens(x)), x)


ATTENTION = {
    "tokens": lambda m, x: attend(x),
    "causal": lambda m, x: attend(x, is_causal=True, scale=0.7),
    "masks": attend_with_mask,
    "columns": attend_by_columns,
    "heads": attend_by_heads,
    "several heads": attend_in_heads,
    "several heads with masks": attend_in_heads_with_masks,
    "keys of other rows": attend_to_other_rows,
    "grouped queries": grouped_queries,
    "class queries": attend_class,
    "rows in features": lambda m, x: SDPA(x.mT, x.mT, x.mT),
    "fewer dims of keys": lambda m, x: SDPA(x.permute(0, 2, 3, 1), m.matrix[None], m.matrix[None]),
    "fewer dims of queries": lambda m, x: (
        SDPA(x, x[:, None], x[:, None] * 2),
        SDPA(x[0], x.flip(1), x),
    ),
    "multi-head": multi_head,
    "multi-head without weights": lambda m, x: multi_head(m, x, need_weights=False)[0],
    "multi-head, all weights": lambda m, x: multi_head(m, x, average_attn_weights=False),
    "multi-head with masks": multi_head_with_masks,
    "multi-head with class token": multi_head_with_class,
    "multi-head of windows": multi_head_of_windows,
    "encoder": encode,
}


def latitudes(x):
    return torch.linspace(-1, 1, x.shape[2], dtype=x.dtype).sin()


def join_folded_rows(model, x):
    """Join rows that are folded into samples or, as bands of columns, into tokens."""
    rows = x.transpose(1, 2).flatten(0, 1)
    other = x[:1].flip(2).transpose(1, 2).flatten(0, 1)
    by_columns = x.mT.flatten(2)
    return (
        torch.cat([rows, other, rows * 2]),
        torch.cat([rows, model.rows[:3, None, :COLUMNS].expand(-1, CHANNELS, -1)]),
        torch.cat([by_columns, x.flatten(2)], 2),
        torch.cat([x.flatten(2)[..., 1:], by_columns], 2),
    )


def look_up_points(m, x):
    rows, points = x.shape[2], x.flatten(2)
    count = points.shape[2]
    index = torch.arange(2 * count) * 5 % count
    table, columns = index.view(-1, 4) // COLUMNS, index.view(-1, 4) % COLUMNS
    few = index[None, None, :5]
    return (
        points.gather(2, index.expand(2, CHANNELS, -1)),
        points.gather(2, index.expand(2, 3, -1)),
        x.gather(3, x[:, :, :3].argsort(3)),
        x.gather(3, index[:3, None].expand(2, CHANNELS, 3, 2) % COLUMNS),
        points.mT.gather(1, (index[:, None] + torch.arange(CHANNELS)).expand(2, -1, -1) % count),
        torch.take_along_dim(points, few, 2),
        torch.take_along_dim(points, few.expand(2, 1, 5).contiguous(), 2),
        x[:, :, table, columns],
        x[:, :, table],
        x[:, :, table - rows, None],
        x[..., table[:, 0], 2:],
    )


REDUCTIONS = {
    "sums": lambda m, x: (x.sum(), x.sum(2), x.mean((0, 2), True), x.sum(dim=(), keepdim=True)),
    "means of nothing": lambda m, x: (x.mean(()), x.mean(dim=[]), torch.std(x)),
    "spellings": lambda m, x: (
        torch.sum(input=x, axis=2, keepdims=True),
        torch.mean(x, dim=[2]),
        x.amax(dim=2),
        torch.var(x, (1, 2), correction=0),
        torch.var(x, 2, False),
        x.std(2, True, True),
    ),
    "types": lambda m, x: (x.float().sum(2, dtype=torch.float64), (x > 0).sum(2), (x > 0).sum()),
    "nan": lambda m, x: (lambda y: (y.nansum(2), y.nanmean(2), y.nanmean()))(
        x.where(x > 0, torch.nan)
    ),
    "extrema": lambda m, x: (
        x.amax(2),
        x.amin((1, 2)),
        x.max(),
        x.min(),
        x.relu().amax(2),
        x.relu().amax(),
        x.max(2),
        x.min(2, keepdim=True),
        x.argmax(2),
        x.argmin(2, True),
        (x * 9).int().amax(2),
    ),
    "all and any": lambda m, x: (
        (x > 0).all(2),
        (x > 3).any(2),
        (x > 9).any(),
        (x > -99).all(2, True),
    ),
    "products": lambda m, x: (x.prod(2), x.relu().prod(2, True), x.prod()),
    "logsumexp": lambda m, x: (
        x.logsumexp(2),
        x.logsumexp((1, 2), True),
        torch.special.logsumexp(x, 2),
    ),
    "norms": lambda m, x: (
        x.norm(),
        x.norm(dim=2),
        x.norm(3, 2, True),
        torch.linalg.norm(x, dim=(2, 3)),
        torch.linalg.vector_norm(x, 1, (1, 2)),
        torch.linalg.vector_norm(x, float("inf"), 2),
        torch.linalg.vector_norm(x, 0, 2),
        (x * 0).norm(dim=2),
        torch.linalg.norm(x, 2, 2),
    ),
    "variances": lambda m, x: (
        x.var(2),
        x.std(),
        x.std((2, 3), keepdim=True),
        *torch.var_mean(x, (1, 2)),
        *torch.std_mean(x, 2, keepdim=True),
        (x * 0).std(2),
        (x * 0 + 3.1).std((2, 3)),
        torch.std(x, 2, correction=2),
    ),
    "count_nonzero": lambda m, x: (x.relu().count_nonzero(2), x.relu().count_nonzero()),
    "softmax": lambda m, x: (
        x.softmax(2),
        F.log_softmax(x, 2),
        F.softmin(x, 2),
        x.softmax(3),
        x.softmax(-1),
        torch.softmax(x, 2, torch.float64),
        F.softmax(x.float(), dim=2, dtype=torch.float64),
        x.where(x > -0.5, -torch.inf).softmax(1),
    ),
    "scans": lambda m, x: (
        x.cumsum(2),
        x.cumprod(2),
        torch.cumsum(x, dim=1),
        x.relu().cumprod(axis=2),
        x.flatten(0, 1).cumsum(1),
        x.flip(2).cumsum(2).flip(2),
        (x > 0).cumsum(2),
    ),
    "scans of folded rows": lambda m, x: x.transpose(1, 2).flatten(0, 1).cumsum(0),
    "sorts": lambda m, x: (
        x.sort(2),
        x.sort(),
        x.argsort(2, descending=True),
        x.topk(2, 2),
        x.topk(2, dim=1)[0],
        x.cummax(2),
        x.logcumsumexp(2),
        F.glu(x, 1),
        torch.sort(x, stable=True, dim=2),
    ),
    "order statistics": lambda m, x: (
        x.kthvalue(2, 2),
        x.median(2, keepdim=True),
        x.median(1),
        x.mode(3),
        x.nanmedian(2)[0],
    ),
    "gradients": lambda m, x: (
        *torch.gradient(x),
        *torch.gradient(x, dim=2),
        *torch.gradient(x, spacing=2.0, dim=(1, -1)),
        *torch.gradient(x, spacing=(0.5, 3.0), dim=(2, 3), edge_order=2),
        *torch.gradient(x, spacing=(latitudes(x),), dim=2),
        *torch.gradient(x, spacing=(torch.arange(COLUMNS) ** 2, latitudes(x)), dim=(3, 2)),
        *torch.gradient(x.flatten(1, 2), dim=2),
        *torch.gradient(x, spacing=(x[0, 0, :, 0].detach().exp().cumsum(0),), dim=2),
    ),
    "differences": lambda m, x: (
        x.diff(dim=2),
        x.diff(),
        x.diff(1, 2, x[:, :, :1]),
        torch.diff(x, n=2, dim=2),
        x.diff(dim=2, append=x[:, :, -1:]),
    ),
}

MIXTURES = {
    "normalize": lambda m, x: (F.normalize(x), F.normalize(x, dim=2), F.normalize(x, 1.0, (2, 3))),
    "cosine": lambda m, x: (
        F.cosine_similarity(x, x.roll(1, 2)),
        F.cosine_similarity(x, m.rows[: x.shape[2]], dim=2),
        F.cosine_similarity(x * 0, x, 2),
        F.pairwise_distance(x, x * 2),
        F.cosine_similarity(x1=x, x2=x, dim=-1),
        F.cosine_similarity(x, x[..., :1], -1),
        F.cosine_similarity(x[:, :, 1:2], x, 2),
        F.cosine_similarity(x, m.scale[:1, None, None]),
        F.cosine_similarity(x[0], x * 2, -4),
    ),
    "group norm": lambda m, x: (
        F.group_norm(x, 2),
        F.group_norm(x, 4, m.scale),
        F.group_norm(x, 2, weight=m.scale, bias=m.scale, eps=1e-3),
        F.group_norm(x.transpose(0, 2), 2),
        F.group_norm(x.transpose(1, 2), x.shape[2]),
    ),
    "instance norm": lambda m, x: (
        F.instance_norm(x),
        F.instance_norm(x, weight=m.scale),
        m.instance_norm(x),
        F.instance_norm(x.mT),
        F.instance_norm(x, m.scale.detach(), m.scale.detach(), use_input_stats=False),
    ),
    "layer norm": lambda m, x: (
        F.layer_norm(x, x.shape[2:]),
        F.layer_norm(x, x.shape[1:], eps=0.1),
        F.layer_norm(x, (COLUMNS,)),
        F.layer_norm(x, x.shape[2:], m.rows[: x.shape[2]], m.rows[: x.shape[2]]),
        F.rms_norm(x, x.shape[2:], m.rows[: x.shape[2]]),
        F.rms_norm(x, x.shape[3:]),
        F.rms_norm(x.mT, (x.shape[2],)),
        nn.functional.layer_norm(input=x, normalized_shape=[COLUMNS], weight=m.rows[0]),
    ),
    "batch norm": lambda m, x: (
        torch.batch_norm(x, m.scale, None, None, None, True, 0.1, 1e-5, False),
        F.batch_norm(x, None, None, m.scale, training=True),
        F.batch_norm(x.transpose(0, 2), None, None, training=True),
        F.batch_norm(x.transpose(1, 2), None, None, training=True),
        F.batch_norm(folded(x), None, None, training=True),
        F.group_norm(folded(x), 2),
        F.instance_norm(folded(x)),
        F.layer_norm(folded(x), (2 * x.shape[2], COLUMNS)),
    ),
    "local response norm": lambda m, x: F.local_response_norm(x, 3),
    "lp pool": lambda m, x: (
        F.lp_pool2d(x.abs(), 2, (1, 2)),
        F.lp_pool2d(x.abs(), 3, (1, 3), (1, 2)),
    ),
    "matrix products": lambda m, x: (
        x @ x.mT,
        x.mT @ x,
        m.matrix @ x.flatten(2),
        x @ m.rows[0],
        x[0, 0] @ m.rows[0],
        m.rows[: x.shape[2]].T @ x,
        torch.matmul(x, other=x.mT),
        x[0, 0, :, 0].dot(x[0, 1, :, 0]),
        torch.inner(x[0, 0, :, 0], x[1, 0, :, 0]),
        torch.outer(x[0, 0, :, 0], m.scale),
        torch.mv(x[0, 0], m.rows[0]),
        m.rows[:, 0][: x.shape[2]] @ x,
        torch.tensordot(x, m.matrix, ([1], [0])),
        torch.tensordot(x, x, 4),
        torch.tensordot(x, x, ([2, 3], [2, 3])),
    ),
    "einsum": lambda m, x: (
        torch.einsum("...hw,...gw->...hg", x, x),
        torch.einsum("bchw,cd", x, m.matrix),
        torch.einsum("b...,b...->...", x, x),
        torch.einsum("bchw->bc", x),
        torch.einsum("...c,hc->h...", x, m.rows[: x.shape[2]]),
        torch.einsum("bchw, dc -> bdhw", x, m.matrix),
        torch.einsum("hw,hw", x[0, 0], x[1, 0]),
    ),
    "linear": lambda m, x: (
        F.linear(x.movedim(1, -1), m.matrix),
        F.linear(x.mT, m.rows[: x.shape[2]].T, m.scale[:6]),
        F.linear(x[:1, :1].flatten(1), m.rows[: x.shape[2]].reshape(1, -1), m.scale[:1]),
    ),
    "losses": lambda m, x: (
        F.mse_loss(x, x.roll(1, 2)),
        F.l1_loss(x, x.flip(2), reduction="sum"),
        F.smooth_l1_loss(x, x * 3),
        F.huber_loss(x, x * 3, "none"),
        F.binary_cross_entropy_with_logits(x, (x > 0).double()),
        F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
        F.cross_entropy(x, x.argmax(1)),
        F.cross_entropy(x, x.softmax(1)),
        F.cross_entropy(x, x.argmax(1), ignore_index=2, label_smoothing=0.1),
        F.nll_loss(x.log_softmax(1), x.argmax(1), m.scale.detach(), reduction="sum"),
    ),
    "prelu": lambda m, x: (F.prelu(x, m.scale), F.prelu(x.permute(2, 1, 0, 3), m.scale[:1])),
    "lstm": lambda m, x: m.lstm(x.permute(0, 2, 3, 1).flatten(0, 1)),
    "gru": lambda m, x: m.gru(x.permute(3, 0, 2, 1).flatten(1, 2)),
    "lstm of rows": lambda m, x: m.lstm(x.permute(0, 3, 2, 1).flatten(0, 1)),
    "cell": lambda m, x: m.cell(x.permute(0, 2, 3, 1).flatten(0, 2)),
}


def moved(x):
    """Return `x` with bands of columns, and rows in one piece."""
    return torch.fft.ifft(x, dim=2).real


SPECTRAL = {
    "one dim": lambda m, x: (
        torch.fft.rfft(x),
        torch.fft.fft(x, dim=2),
        torch.fft.irfft(torch.fft.rfft(x, dim=2), x.shape[2], 2),
    ),
    "two dims": lambda m, x: (
        torch.fft.rfft2(x, norm="ortho"),
        torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]),
        torch.fft.fft2(x, (4, 4)),
        torch.fft.fftn(x, dim=(1, 2)),
        torch.fft.ifft2(x, dim=(2, 1)),
    ),
    "all dims": lambda m, x: torch.fft.rfftn(x),
    "shifts": lambda m, x: (
        torch.fft.fftshift(x),
        torch.fft.ifftshift(x, 2),
        torch.fft.fftshift(x, dim=(2, 3)),
    ),
    "neural operator": lambda m, x: (
        x
        + torch.fft.irfft2(
            torch.einsum("bihw,io->bohw", torch.fft.rfft2(x), m.matrix.to(torch.complex128)),
            s=x.shape[-2:],
        )
    ),
    "complex": lambda m, x: (
        torch.view_as_real(torch.complex(x, x * 2)),
        torch.view_as_complex(x.unflatten(-1, (3, 2))).abs(),
        torch.polar(x.abs(), x).real,
        torch.complex(x, x).conj().imag,
        torch.complex(x, x).angle(),
        torch.real(torch.complex(x, -x)),
    ),
    "convolution of moved bands": lambda m, x: F.conv2d(
        moved(x), m.matrix[:, :, None, None].expand(-1, -1, 3, 1), padding=(1, 0)
    ),
    "sums of moved bands": lambda m, x: (
        moved(x) + x,
        x * moved(x),
        torch.cat([x, moved(x)], 2),
        torch.stack([moved(x), x]),
    ),
}


def copy_of_all_rows(x, select):
    y = select(x, torch.arange(x.shape[2]))
    y += 1
    return x + y


def folded(x):
    """Return the field with its rows repeated, each rank with bands of both copies."""
    return torch.stack([x, x * 2], 2).flatten(2, 3)


INDEXING = {
    "slices of folded rows": lambda m, x: (
        folded(x)[:, :, 1:6],
        folded(x)[:, :, :5, None, 2:],
        folded(x)[:, torch.tensor([0, 2]), 3:],
        folded(x).narrow(2, 2, 3),
        folded(x)[0, ..., 4:5, :],
        folded(x)[:, :, -3],
        folded(x)[:, :, : 2 * x.shape[2]],
        folded(x).index_select(2, torch.tensor([5, 0, 1])),
    ),
    "moves of folded rows": lambda m, x: (
        folded(x).roll((1, 2), (2, 3)),
        folded(x).flip(2, 0),
        folded(x).flip(3),
        F.pad(folded(x), (1, 1, 2, 1), mode="circular"),
        F.pad(folded(x), (0, 0, -1, 3), value=2.0),
    ),
    "indices of numpy": lambda m, x: (
        x[:, np.array([[0, 1], [2, 0]])].sum((1, 2)),
        x[:, np.array([0, 1]), :, [0, 1]].sum((0, 1)),
        x[:, np.int64(3)].sum(1),
        x[:, :, np.array([3, 0, 2, 2])],
    ),
    "all rows in their order are a copy": lambda m, x: (
        copy_of_all_rows(x, lambda x, rows: x[:, :, rows]),
        copy_of_all_rows(x, lambda x, rows: x.index_select(2, rows)),
    ),
    "steps": lambda m, x: (
        x[:, :, ::2],
        x[:, :, 1::2],
        x[:, :, 1:-1],
        x[..., ::3],
        x.narrow(dim=2, start=1, length=2),
    ),
    "select": lambda m, x: (
        x[:, :, -1],
        x.select(1, index=2),
        x[0],
        x.unbind(2)[1],
        x[:, (0, 1)],
        x[[1, 0]],
    ),
    "whole index of rows": lambda m, x: (
        x[:, :, torch.tensor([3, 0, 0, -1])],
        x.index_select(2, torch.tensor([1, 1, 2, 3, 0])),
        x[:, :, [2, 1]],
        x[0, :, torch.tensor([0, 2])],
        x.index_select(dim=1, index=torch.tensor([0, 7])),
    ),
    "index with rows": lambda m, x: (
        m.matrix[x.argmax(1)],
        F.embedding(x.argmax(1), m.matrix),
        F.one_hot(x.argmax(1), 8),
    ),
    "tables of points": look_up_points,
    "gather": lambda m, x: (
        x.gather(1, x.argsort(1)[:, :2]),
        x.take_along_dim(x.argsort(3), 3),
        x.gather(2, x.argsort(2)),
        torch.gather(x, dim=1, index=x.argmax(1, keepdim=True)),
        x.take_along_dim(indices=x.argmax(1, True), dim=1),
    ),
    "index_add": lambda m, x: (
        x.index_add(1, torch.tensor([0, 0]), x[:, :2], alpha=2),
        x.scatter_add(1, x.argsort(1), x),
    ),
    "repeat": lambda m, x: (
        x.repeat(1, 1, 2, 1),
        x.repeat(2, 1, 1, 1, 2),
        torch.tile(x, (2, 1)),
        x.repeat_interleave(2, 2),
        x.expand(3, *x.shape),
        x[:, :1].expand(-1, 4, -1, -1),
        x.tile(2, 1, 1, 1),
        x.repeat(1, 1, 2, 1).sum(2),
    ),
    "repeat_interleave": lambda m, x: (
        x.repeat_interleave(3, dim=1, output_size=3 * CHANNELS),
        torch.repeat_interleave(x, 2, -2),
        x.transpose(1, 2).flatten(0, 1).repeat_interleave(2, 0),  # rows after samples
        x[:1, 0].repeat_interleave(2),
    ),
    "joins": lambda m, x: (
        torch.cat([x, x], axis=2),
        torch.concat((x, m.scale.expand(2, 8, 8)[:, :, :COLUMNS, None].mT), 2),
        torch.stack([x, x], dim=-1),
        torch.cat([x[:, :, :2], x], 2),
        torch.cat([x, x.mT.flip(2).mT], 2),
    ),
    "joins of folded rows": join_folded_rows,
    "flips and rolls": lambda m, x: (
        x.flip(2, 3),
        torch.flip(x, dims=[2]),
        x.roll((1, -2), (2, 3)),
        x[0].fliplr(),
        x.rot90(1, (1, 3)),
        x[:, 0].rot90(1, (1, 2)),
        x[:, 0].rot90(-1, [1, 2]),
        x.rot90(2, (2, 3)),
        x.flipud(),
        x.roll(shifts=-3, dims=2),
    ),
    "triangles": lambda m, x: (
        x.triu(),
        x.tril(1),
        x.mT.triu(-1),
        x.transpose(0, 2).tril(),
        x.diagonal(0, 1, 3),
        x.diagonal(0, -1, 1),
    ),
    "shuffles": lambda m, x: (
        F.pixel_shuffle(x, 2),
        F.pixel_unshuffle(torch.cat([x, x], 2), 2),
        F.pixel_shuffle(x.mT, 2),
        F.pixel_shuffle(x[0], 2),
        F.channel_shuffle(x, 4),
        F.pixel_shuffle(x[None], upscale_factor=2),
    ),
    "operators": lambda m, x: (
        torch.ops.aten.relu(x),
        torch.ops.aten.add_.Tensor(x * 1, m.scale[:, None, None], alpha=2),
        torch.ops.aten.sum.dim_IntList(x, [2], keepdim=True),
        torch.ops.aten.gelu.default(self=x, approximate="tanh"),
    ),
    "meshgrid": lambda m, x: (
        torch.meshgrid(x[0, 0, :, 0], m.scale, indexing="xy"),
        torch.meshgrid(m.scale, x[0, 0, :, 0], indexing="ij"),
        torch.broadcast_tensors(x, x[:, :1], m.scale[:, None, None]),
    ),
    "grid_sample": lambda m, x: F.grid_sample(
        x, x[:, :2].movedim(1, -1).tanh(), align_corners=True
    ),
    "queries": lambda m, x: x * x.is_floating_point() + x.is_complex() + x.element_size() + x.dim(),
    "names": lambda m, x: (
        torch.permute(input=x, dims=(0, 1, 3, 2)),
        torch.unsqueeze(input=x, dim=1),
        x.reshape(shape=(2, -1)),
        x.flatten(end_dim=1),
    ),
}


def assigned(x, *assignments):
    """Return the field after values were assigned to parts of it, one after the other."""
    y = x * 1
    for index, value in assignments:
        y[index] = value
    return y


ALL = slice(None)
ASSIGNMENTS = {
    "numbers": lambda m, x: assigned(
        x,
        ((ALL, ALL, 0), 2.0),
        ((0, ALL, -1, 1), 3.0),
        ((..., slice(1, 3), ALL), 4.0),
        ((ALL, 2, slice(3, 1)), 5.0),
        (slice(None, None, 2), 6.0),
    ),
    "rows of fields": lambda m, x: assigned(
        x,
        ((..., slice(2), ALL), x.sin()[:, :, 1:3]),
        ((0, slice(2), slice(1, None)), x[1, 2:4, 1:]),
        ((ALL, ALL, slice(None, None, 2)), x.cos()[:, :, ::2]),
        ((ALL, ALL, ALL, 1), x[..., 2]),
        ((1, ALL, 2), x[0, :, 0]),
        ((ALL, None, 0, 1), x[:, None, 1, 1]),
    ),
    "parameters": lambda m, x: assigned(
        x,
        ((ALL, ALL, slice(1, 4)), m.rows[:3]),
        ((ALL, ALL, 0), m.rows[0]),
        ((0, ALL, -1), m.matrix[:, :COLUMNS]),
        ((ALL, slice(3), slice(3)), m.rows[0, 0]),
        ((1, ALL, slice(-2, None), slice(2)), m.matrix[:, :4].reshape(CHANNELS, 2, 2)),
    ),
    "sums of rows": lambda m, x: assigned(
        x, ((ALL, ALL, slice(3)), x.mean(2, keepdim=True)), ((ALL, ALL, 3), x.mean(2))
    ),
    "bands in another dimension": lambda m, x: assigned(
        x.transpose(1, 2), ((ALL, slice(4), slice(4)), x[:, :4, :4]), ((0, 1, 2), x[0, 2, 1])
    ).transpose(1, 2),
    "folded rows": lambda m, x: assigned(
        folded(x), ((0, ALL), folded(x)[1].sin()), ((ALL, ALL, ALL, 2), 1.0)
    ),
    "masks": lambda m, x: assigned(
        x, (x > 1, 1.0), (x.sum(3) < 0, 0.5), (x.mean((2, 3)) > 0.1, -0.5)
    ),
}


def kernel(m, *sizes):
    return m.matrix[:, :, None, None].expand(-1, -1, *sizes) / 8


def dilated(m, x, dilation):
    return F.conv2d(x, kernel(m, 3, 3), padding=dilation, dilation=dilation)


def branches(m, x, *dilations):
    """Return the sum of convolutions that read the same field, of any kernel and stride."""
    parts = [dilated(m, x, dilation) for dilation in dilations]
    step = 2 if x.shape[2] >= 7 else 1  # a row for each rank
    for size in (4, 3):
        coarse = F.conv2d(x, kernel(m, size, 1), stride=(step, 1), padding=(2, 0))
        parts.append(F.interpolate(coarse, x.shape[2:]))
    return sum(parts) + F.conv2d(x, kernel(m, 3, 1)[:, :1], padding=(1, 0), groups=CHANNELS)


def changed_between(m, x):
    with torch.no_grad():
        y = x * 1
        first = dilated(m, y, 1)
        y.mul_(m.scale[:, None, None])
        second = dilated(m, y, 1)
    return x * first + second + dilated(m, y, 2)


def ask_for_a_gradient_in_between(model, x):
    y = x.detach()
    a = dilated(model, y, 1)
    y.requires_grad_()
    b = dilated(model, y, 2)
    return a + b + x * torch.autograd.grad(b.sum(), y, retain_graph=True)[0]


def write_to_data_in_between(model, x):
    with torch.no_grad():
        y = x * 1
        a = dilated(model, y, 1)
        y.data.mul_(2)
        return a + dilated(model, y, 2)


def one_field_by_two_names(model, x):
    def block(y, z):
        return dilated(model, y, 1) + dilated(model, z, 2).tanh()

    y = checkpoint(block, x, x, use_reentrant=False)
    y = y + checkpoint(block, x, z=x, use_reentrant=False)
    return y + checkpoint(lambda z: block(z, x), x, use_reentrant=False)


def recomputed_from_containers(model, x):
    def block(fields, factor, *, z):
        return (fields["x"][0] * factor).sin() * z

    fields = {"x": [x, 1]}
    y = checkpoint(block, fields, model.scale[0], z=x * 2, use_reentrant=False)
    return y + checkpoint(lambda z: block({"x": (z, None)}, 3, z=x), x, use_reentrant=False)


def recomputed_between(m, x):
    def part(x):
        return dilated(m, x, 1) * dilated(m, x, 2)

    first = dilated(m, x, 1)
    again = [checkpoint(part, x, use_reentrant=False) for _ in range(2)]
    return first + again[0] * again[1] + dilated(m, x, 2)


LAYERS = {
    "convolutions in other dims": lambda m, x: (
        F.conv2d(x.mT, kernel(m, 3, 5), m.scale, stride=(2, 1), padding=(1, 2)),
        F.conv2d(x.mT, kernel(m, 3, 1), padding="same"),
        F.conv_transpose2d(x.mT, kernel(m, 2, 4), None, (1, 2), (0, 1)),
        F.conv2d(x.mT, kernel(m, 3, 1)[:, :2], groups=4),
        F.conv3d(x[:, :, None].transpose(2, 3), kernel(m, 3, 1)[..., None], padding=(1, 0, 0)),
        F.conv1d(
            x.permute(0, 3, 1, 2).flatten(0, 1), m.matrix[:, :, None].expand(-1, -1, 3), padding=1
        ),
        F.conv1d(x.permute(0, 2, 1, 3).flatten(0, 1), m.matrix[:, :, None].expand(-1, -1, 3)),
        F.conv2d(x.transpose(0, 2), kernel(m, 1, 3)),
        F.conv_transpose2d(x.transpose(0, 2), kernel(m, 1, 3)),
        F.conv2d(
            x.transpose(1, 2),
            m.rows[: x.shape[2], :3, None, None].mT.transpose(0, 1).reshape(3, -1, 1, 1),
        ),
    ),
    "convolutions of one field": lambda m, x: branches(m, x, 1, 2, 5, 3),
    "wide convolutions of one field first": lambda m, x: branches(m, x, 4, 1),
    "convolutions of a field that changes": changed_between,
    "convolutions of one field, some computed again": recomputed_between,
    "convolutions before and after a gradient is asked for": ask_for_a_gradient_in_between,
    "convolutions before and after data are written": write_to_data_in_between,
    "convolutions of a field that is recomputed by two names": one_field_by_two_names,
    "recomputed from containers and keywords": recomputed_from_containers,
    "dilated convolution": lambda m, x: F.conv2d(
        x, kernel(m, 5, 1), padding=(2 * x.shape[2] // 3, 0), dilation=(x.shape[2] // 3, 1)
    ),
    "pools in other dims": lambda m, x: (
        F.max_pool2d(x.mT, (2, 1)),
        F.avg_pool2d(x.mT, 3, 1, 1),
        F.adaptive_avg_pool2d(x.mT, (2, None)),
        F.max_pool2d(x.transpose(0, 2), 2),
        F.interpolate(x.mT, scale_factor=(1, 2)),
        F.interpolate(x.mT, size=(4, 5), mode="bilinear"),
        F.interpolate(x.mT, size=(4, 5), mode="bicubic", antialias=True),
    ),
    "adaptive average of many rows": lambda m, x: banded_like(x, F.adaptive_avg_pool2d(x, (4, 2))),
    "adaptive average of few rows": lambda m, x: (
        F.adaptive_avg_pool2d(x, 1),
        F.adaptive_avg_pool2d(x, (1, 3)),
        F.adaptive_avg_pool1d(x[0].mT, 1),
    ),
}


def banded_like(x, y):
    """Return `y`, which has to be in bands if `x` is."""
    without = (None, PLAIN)
    assert (dim_of_bands(y) in without) == (dim_of_bands(x) in without)
    return y


def fold_again(model, x, size, **settings):
    windows = F.unfold(x, size, **settings)
    factors = torch.linspace(1, 2, windows[0].numel(), dtype=x.dtype).view(windows.shape[1:])
    return F.fold(windows * factors, x.shape[-2:], size, **settings)


def swin_windows(model, x, size=4):
    """Return `x` after attention in windows, of which there may be fewer than ranks."""
    height = x.shape[2]
    x = F.pad(x, (0, 0, 0, -height % size))
    windows = x.unflatten(2, (-1, size)).unflatten(4, (-1, 2)).permute(0, 2, 4, 3, 5, 1)
    tokens = windows.reshape(-1, size * 2, CHANNELS)
    tokens = SDPA(tokens, tokens, tokens) @ model.matrix
    y = tokens.view(windows.shape).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)
    return (x + y)[:, :, :height]


WINDOWS = {
    "swin": swin_windows,
    "rows that are spread": lambda m, x: x.reshape(2, CHANNELS, COLUMNS, -1).softmax(-1),
    "rows in parts": lambda m, x: (
        tokens(x)[:1].reshape(x[:1].shape) * x[:1],
        tokens(x).reshape(2, -1, 2, x.shape[2] * 2),
        x[0].transpose(0, 1).reshape(CHANNELS, -1).sin(),
    ),
    "unfold": lambda m, x: (
        F.unfold(x, 3, padding=1),
        F.unfold(x, (1, 2), stride=(1, 2)),
        F.unfold(x.transpose(1, 2), (2, 2), padding=(0, 1)),
        F.unfold(x.transpose(0, 2), (1, 3)),
        F.unfold(input=x, kernel_size=(3, 1), dilation=(2, 1), padding=(2, 0)),
    ),
    "fold": lambda m, x: (
        fold_again(m, x, (3, 2), padding=(1, 0)),
        fold_again(m, x, (3, 3), padding=(2, 1), dilation=(2, 1)),
    ),
    "windows along a dimension": lambda m, x: (
        x.unfold(1, 3, 2),
        x.unfold(2, 1, 1),
        F.pad(x, (0, 0, 1, 1), mode="circular").unfold(2, 3, 1).mean(-1),
    ),
    "fewer windows than ranks": lambda m, x: (
        x.unfold(2, x.shape[2], 1) * 2,
        x.flip(2).unfold(-2, x.shape[2] - 1, 1).mean(-1),
        F.unfold(x, (x.shape[2], 2)),
        F.unfold(x[:1].mT, (2, x.shape[2]), padding=(1, 0)),
        fold_again(m, x, (x.shape[2], 2)),
        fold_again(m, x[:1], (x.shape[2] - 1, 3), dilation=(1, 2)),
        fold_again(m, x.transpose(1, 2), (CHANNELS, 2)),
        F.unfold(x[0].transpose(0, 1), 2),  # one sample, whose rows are channels
        F.fold(F.unfold(x[0], 3, padding=1), x.shape[2:], 3, padding=1),
        # Folded rows are channels: a band's first row may be at a channel's border, not its last.
        F.fold(x.reshape(4, -1, COLUMNS), (3, 4), 2),
    ),
}


def _change_few_rows(m, x):
    """Write to slices of few rows and to what they are slices of."""
    y = x * 1
    north, south = y[:, :, :1], y[:, :, -2:]
    mean = north.mean(-1, keepdim=True)
    north.mul_(2)
    south[:, :2] = mean[:, :2]
    after = north.softmax(-1)
    y[:, 1:3] *= 3
    south.copy_(south.flip(2) + after)
    north.scatter_(1, north.argsort(1)[:, :1], 0.25)
    return y, y + north, torch.cat([north, south], 2).sum(2, keepdim=True) + y


def _changed_by_hooks(m, x):
    """Return fields of slices whose gradients hooks have changed."""
    north = x[:, :, :2]
    before = north.flip(2)
    north.register_hook(lambda grad: grad * 2)
    return x + north.sum(2, keepdim=True), x * torch.cat([before, north], 2).amax(2, keepdim=True)


def _change_what_functions_return(m, x):
    """Write to slices of few rows that functions return as they are."""
    y = x * 1
    north, south = y[:, :, :1], y[:, :, -2:]
    before = north.exp()
    north.double().mul_(m.scale[:, None, None])
    F.dropout(south, 0.5, training=False).add_(1)
    return y, y * north, y + before, y + south[:, :, :1]


def _gradients_of_slices(m, x):
    """Return fields of gradients for slices that several functions have got, and of a corner."""
    constant = x[:, :, :1] * m.scale[:, None, None]
    constant.detach_()
    north, south = x[:, :, :2].detach(), x[:, :, -1:]
    north.requires_grad_()
    loss = (north * m.scale[:, None, None]).square().sum() + north.exp().sum() + south.exp().sum()
    loss = loss + (south * m.scale[:, None, None]).square().sum()
    of_north, of_south = torch.autograd.grad(loss, [north, south], create_graph=True)
    (of_corner,) = torch.autograd.grad(x[:1, :1, :1, :1], x, create_graph=True)
    return x + of_north.sum(2, keepdim=True), x * of_south, x * constant + of_corner


RETURN_THEIR_ARGUMENT = {
    "to": lambda x: x.to(x.dtype),
    "double": torch.Tensor.double,
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of channels": lambda x: F.dropout2d(x, 0.5, training=False),
    "positive": torch.positive,
    "resolve_conj": torch.Tensor.resolve_conj,
}


def _read_twice(m, x):
    """Return a number of a field that one function takes where it is and another elsewhere."""
    return (x * m.scale[:, None, None]).square().sum() + x.exp().sum()


def _gradients_of_returned_arguments(m, x):
    """Return fields of gradients for what functions return as it is; others get the argument."""
    north, gradients = x[:, :, :2], 0.0
    for function in RETURN_THEIR_ARGUMENT.values():
        same = function(north)
        (grad,) = torch.autograd.grad(_read_twice(m, north), same, create_graph=True)
        gradients = gradients + grad
    return x + gradients.sum(2, keepdim=True)


def _hooks_of_returned_arguments(m, x):
    """Return fields of slices with hooks that were registered on what functions return as it is."""
    results = []
    for function in RETURN_THEIR_ARGUMENT.values():
        north = x[:, :, :2]
        function(north).register_hook(lambda grad: grad * 2 + 0.1)
        results.append(x + _read_twice(m, north))
    return results


def _hook_of_copy(m, x):
    """Return a field of a slice whose copy, which some ranks need not make, has a hook."""
    north = x[:, :, :1]
    copy = north.contiguous()
    copy.register_hook(lambda grad: grad * 2 + 0.1)
    (grad,) = torch.autograd.grad(_read_twice(m, north) + copy.square().sum(), copy)
    return x + _read_twice(m, north), x * copy.exp().sum(2, keepdim=True) + grad.sum()


def _change_past_autograd(m, x):
    """Write to slices, and to new tensors of few rows, of which autograd sees the values only."""
    y = x * 1
    north, south, other = y[:, :, :2], -x[:, :, -2:], x[:, :, :1].detach().clone()
    other.requires_grad_()
    with torch.no_grad():
        north.add_(1)
        south.mul_(2)
        south[..., :3] = 0.5
        other.mul_(2)
    assert (north.requires_grad, south.requires_grad, other.is_leaf) == (True, True, True)
    (grad,) = torch.autograd.grad(_read_twice(m, other), other, create_graph=True)
    return y, x * (north * south).sum(2, keepdim=True), x + south.exp().sum() + grad


def _change_with_saved_results(m, x):
    """Write results to slices, which backward needs and nothing may write to again."""
    y, z = x * 1, x * 1
    y[:, :, :1].tanh_()
    part = z[:, :, -2:][:, :4]
    part.sigmoid_()
    first, second = x[:, :, :1] * 1, -x[:, :, :1]
    F.relu(first, inplace=True)
    second.cumsum_(-1)
    return y, z, part.sum(2, keepdim=True) * x[:, :4], first * x + second


def change_windows_in_place(model, x, size, dim):
    y = x + 0
    y.unfold(dim, size, 2)[..., 0].mul_(3)
    return y


SLICES = {
    "of few rows": lambda m, x: (
        x + x[:, :, :1],
        x[:, :, :1].expand(-1, -1, x.shape[2], -1) * x,
        x[:, :, -1:].mean(-1, keepdim=True) + x,
        (x[:, :, :2] @ m.rows[:COLUMNS]).sum(2, keepdim=True) * x,
        torch.cat([x[:, :, :1], x[:, :, -1:]], 2).flip(2).mean(2, keepdim=True) - x,
        torch.cat([x[:, :, -1:], x, x[:, :, :1]], 2)[:, :, 1:-1],
        torch.stack([x[:, :, :1], x[:, :, 1:2]]).sum(0) + x,
        x[:, :, 1:2].data * x + x[:, :, :1].detach() * x[:, :, -2:-1],
        x[:, :, :2].unbind(2)[0][:, :, None] - x,
        x[:, :, :2].repeat(1, 1, 2, 1).amax(2, keepdim=True) + x,
        x[:, :, :1].squeeze(2)[:, :, None] * x[:, :, :1] + x,
        x[:, :, :1][..., 1:4].roll(1, -1).sum(-1, keepdim=True) + x,
        F.pad(x[:, :, :2], (0, 0, 1, 0), mode="reflect").sum(2, keepdim=True) * x,
        F.conv2d(x[:, :, :3], kernel(m, 3, 3), padding=(0, 1)) + x,
        x[:, :, :1] * m.rows[: x.shape[2]] + x,
        torch.cat([x[:, :, :1], x[:, :, :1] * m.rows[:1]], 1).sum(1, keepdim=True) + x,
        x[:, :1, :1, :1] * x[:, :, :1] + x[:, :1, :, :1] * x[:, :, :1],
        x[:, :, :2].masked_fill(x[:, :, :2] > 0, 1.0).prod(2, keepdim=True) + x,
    ),
    "that are written": _change_few_rows,
    "that functions return": _change_what_functions_return,
    "whose gradients are asked for": _gradients_of_slices,
    "with hooks": _changed_by_hooks,
    "that are returned, with gradients": _gradients_of_returned_arguments,
    "that are returned, with hooks": _hooks_of_returned_arguments,
    "that are copied": _hook_of_copy,
    "that are written past autograd": _change_past_autograd,
    "that get results": _change_with_saved_results,
    "in windows": lambda m, x: [
        change_windows_in_place(m, x, size, dim)
        for size, dim in ((1, 2), (2, -2), (x.shape[2] - 1, 2), (3, 3), (3, 1))
    ],
}


def row_index(x, size=None):
    """Return an index along the rows of `x`, in another order and with repetitions."""
    height = x.shape[-2]
    return torch.arange(height).flip(0) * 2 % (size or height)


def few_rows(x):
    return row_index(x)[:2]


def write_in_place(model, x):
    """Write along rows and channels to a field of which there are other views."""
    y = x * 1
    view = y.mT
    y.index_add_(2, row_index(y), x, alpha=-0.5)
    y.scatter_(1, x.argsort(1)[:, :1], 0.25)
    y.index_fill_(-2, few_rows(y), model.scale[0])
    y.index_copy_(dim=3, index=torch.tensor([4, 1]), source=x[..., :2])
    y.scatter_add_(-2, x.argsort(2), x)
    return y, view * 2


def assign_to_indices(model, x):
    """Assign values with and without rows to rows and channels that indices name."""
    y = x * 1
    few = few_rows(x)
    y[:, :, few] = x[:, :, 1:3] * 2
    y[:, 1, few] = model.rows[:2]
    y[0, :, few.tolist(), 2:] = model.rows[0, 2:]
    y[..., row_index(x), :] = x.sin()  # the last value of each row
    y[:, :, -few] = 0.5
    y[:, torch.tensor([3, 0])] = x[:, :2] * 3
    y[:, torch.tensor([4, 1]), 1:3] = x[:, :2, 2:4]
    y[:, torch.tensor([6, 7]), :, torch.tensor([0, 5])] = x[:, 3, :, :2].permute(2, 0, 1)
    y[:, [5]] = model.rows[: x.shape[2]]
    y[:, [2, 7], -1] = x[:, :2, 0]
    return y


def assign_on_both_sides_of_a_row(model, x):
    y = x * 1
    y[:, [2, 7], 1, [0, 5]] = x[:, :2, 0, 0] * 2
    return y


def change_every_other_row(model, x):
    x = x + 0
    x[:, :, ::2].mul_(2)
    x[:, :, 1:-1] = 3
    return x


def change_input_of_identities(model, x):
    x = x + 0
    size = x.shape[-2:]
    results = [
        F.interpolate(x, size),
        F.interpolate(x, size, mode="bilinear"),
        F.interpolate(x, size, mode="bicubic", align_corners=True),
        F.pad(x, (0, 0, 0, 0)),
        x.roll(size[0], -2),
        x.diff(n=0, dim=-2),
    ]
    x.mul_(2)
    return results


def unpooled(x, size, **settings):
    spatial = x.ndim - 2
    pool, unpool = (getattr(F, f"{name}{spatial}d") for name in ("max_pool", "max_unpool"))
    values, indices = pool(x, size, return_indices=True, **settings)
    return values, indices, unpool(values * 2, indices, size, output_size=x.shape[2:])


WRITES = {
    "index_add along rows": lambda m, x: (
        x.index_add(2, row_index(x), x * 2, alpha=-0.5),
        x.index_add(-2, index=few_rows(x), source=x[:, :, :2]),
        torch.zeros_like(x).index_add(2, row_index(x), x),
        m.rows[: x.shape[2]].expand(x.shape).index_add(2, row_index(x), x),
        x.new_zeros(2, CHANNELS, 3, COLUMNS).index_add(2, row_index(x, 3), x),
        m.rows[:9]
        .expand(2, CHANNELS, 9, COLUMNS)
        .index_add(2, x[0, 0, :3].argmax(-1), x[:, :, :3]),
        tokens(x).index_add(1, torch.arange(x[0, 0].numel()) // 2, tokens(x) * 2),
        x.flatten(0, 1).index_add(0, torch.tensor([1, 0]), m.rows[: x.shape[2]].expand(2, -1, -1)),
    ),
    "scatter along rows": lambda m, x: (
        x.scatter(2, x.argsort(2), x * 3),
        x.scatter(-2, x.argsort(2)[:, :, :2], 5.0),
        x.scatter(dim=2, index=x.argsort(2)[:, :4], src=x.detach() * 3),
        x.detach().scatter(2, x.argsort(2)[:, :, :1], 2.0, reduce="multiply"),
        x.scatter_add(2, x.argsort(2), src=x),
        x.new_zeros(2, CHANNELS, 3, COLUMNS).scatter_add(2, x.argsort(2) % 3, x),
        x.scatter_reduce(2, x.argsort(2) // 2, x * 2, "amax", include_self=False),
        x.scatter_reduce(2, x.argsort(2) // 2, x * 2, reduce="mean"),
        x.index_copy(2, few_rows(x), x[:, :, 1:3] * 2),
        x.index_fill(2, few_rows(x), m.scale[0]),
    ),
    "scatter along others": lambda m, x: (
        x.scatter(3, x.argsort(3), x * 3),
        x.scatter(1, x.argmax(1, keepdim=True), 2.0),
        x.scatter(1, x.argsort(1)[:, :3], m.matrix[:3, 0].view(3, 1, 1).expand(2, 3, *x.shape[2:])),
        torch.zeros_like(x).scatter_reduce(-1, x.argsort(3) // 2, x, "sum"),
        x.index_copy(1, torch.tensor([3, 0]), x[:, :2] * 2),
        x.index_fill(-1, torch.tensor([3, 0]), 1.5),
    ),
    "in place": write_in_place,
    "assignment to indices": assign_to_indices,
    "cdist": lambda m, x: (
        torch.cdist(tokens(x), m.matrix),
        torch.cdist(m.matrix, tokens(x)),
        torch.cdist(tokens(x), tokens(x).flip(1) * 2, p=1),
        torch.cdist(x, x.flip(2) * 2),
        torch.cdist(x.mT, x.mT.flip(2) * 2, 3.0),
        torch.cdist(x.transpose(1, 2), x.transpose(1, 2).flip(2) * 2),
        torch.cdist(x.transpose(0, 2), m.rows[:5], compute_mode="use_mm_for_euclid_dist"),
        torch.cdist(x1=x.permute(0, 2, 3, 1).reshape(-1, CHANNELS), x2=m.matrix),
        torch.cdist(x[:1], m.rows[:3].expand(2, 1, 3, COLUMNS)),
    ),
    "pools with indices": lambda m, x: (
        unpooled(x, 2),
        unpooled(x.mT, (2, 1)),
        unpooled(x[:, :, :, None], (1, 1, 2), stride=(1, 1, 2)),
        unpooled(x.transpose(0, 2), 2),
        unpooled(x[:, :, 0], 3),
        unpooled(x[0].transpose(0, 1), 2),
        F.max_pool2d(x, 3, 2, 1, return_indices=True),
        F.max_pool2d_with_indices(x, (2, 3), ceil_mode=True),
        F.adaptive_max_pool2d(x, (3, 2), return_indices=True),
        F.adaptive_max_pool2d(x, 1, return_indices=True),
        F.max_unpool2d(
            x.mean((2, 3), True).expand(2, CHANNELS, 2, COLUMNS), x.argsort(3)[:, :, :2], 1
        ),
    ),
    "results equal to an argument are copies": change_input_of_identities,
    "every other row in place": change_every_other_row,
    "pads to few rows": lambda m, x: (
        F.pad(x, (1, 2, -1, 2 - x.shape[2]), value=3.0),
        F.pad(x, (1, 1, 2 - x.shape[2], 1), mode="replicate"),
        F.pad(x, (1, 1, 2 - x.shape[2], 1), mode="reflect"),
        F.pad(x, (0, 0, 1, -x.shape[2]), value=2.0),
        F.pad(tokens(x), (0, 0, 1, -x[0, 0].numel()), value=2.0),
        F.pad(x.flatten(0, 2), (0, 0, -1, -2)),
    ),
    "circular pads that crop": lambda m, x: (
        F.pad(x, (0, 0, -1, 2), mode="circular"),
        F.pad(x, (-1, 1, 1, -2), mode="circular"),
        F.pad(x.mT, (2, -1, 0, 0), mode="circular"),
    ),
}


def add_folded_otherwise(model, x):
    """Add rows of which some follow others, to rows that alternate with others."""
    first = torch.cat([x, 2 * x], 2)
    return first + torch.stack([x, 3 * x], 2).flatten(2, 3), torch.stack([x, x], 3).flatten(
        2, 3
    ) * first


def combine_with_whole_tensors(model, x):
    """Tensors with more dimensions than the field, with a value for each row, and without rows."""
    members = model.scale[:3].view(3, 1, 1, 1, 1)
    of_rows = model.rows[: x.shape[2], :1]
    mean = x.mean(-2, keepdim=True)
    return x * members, members - x, x + of_rows, of_rows * x, mean * x, torch.where(x > 0, mean, x)


def mixed_sizes(m, x):
    """Return layers of a U-Net: a coarse level, and poles that are padded and cropped."""
    small = F.avg_pool2d(x, (2 if x.shape[2] > 6 else 1, 2))
    small = F.interpolate(F.conv2d(small, kernel(m, 3, 3), padding=1), x.shape[2:], mode="bilinear")
    y = F.pad(x + small, (1, 1, 0, 0), mode="circular")
    y = F.pad(y, (0, 0, 1, 1), mode="reflect")[..., 1:-1, 1:-1]
    return y.flip(-2) + torch.roll(y, 3, -2)


LAYOUTS = {
    "mixed sizes": mixed_sizes,
    "where": lambda m, x: (
        torch.where(x > x.mean((2, 3), keepdim=True), x, x.amax(2, keepdim=True)),
        torch.where(condition=x > x.mean(), input=x, other=x.sum(2, True)),
    ),
    "folded otherwise": add_folded_otherwise,
    "beside whole tensors": combine_with_whole_tensors,
}

FAMILIES = {
    "layouts": LAYOUTS,
    "writes": WRITES,
    "windows": WINDOWS,
    "attention": ATTENTION,
    "reductions": REDUCTIONS,
    "mixtures": MIXTURES,
    "spectral": SPECTRAL,
    "indexing": INDEXING,
    "assignments": ASSIGNMENTS,
    "layers": LAYERS,
}


def narrow(m, x):
    """Torch's own rows are wrong there on a CPU: a rule can't equal them."""
    return F.interpolate(x, size=(7, 1), mode="bilinear", antialias=True) * x[..., :7, :]


def drop_out(m, x):
    """All ranks draw the same numbers; here each number is dropped, so that values are known."""
    m.lstm.dropout = 1.0
    columns = x.permute(0, 2, 3, 1)
    return m.lstm(columns.flatten(0, 1))[0].unflatten(0, columns.shape[:2]).transpose(1, 2)


def points_of_a_grid(x):
    axes = [torch.linspace(-0.9, 0.9, n, dtype=x.dtype) for n in (x.shape[3], x.shape[2])]
    return torch.stack(torch.meshgrid(*axes, indexing="xy"), -1).expand(len(x), -1, -1, -1)


OTHERS = {
    "range as an index": lambda m, x: x[:, range(3)],
    "weights of channels that are rows": lambda m, x: F.prelu(x.transpose(1, 2), latitudes(x)),
    "both sides of a row": assign_on_both_sides_of_a_row,
    "factor that is a tensor": lambda m, x: x.index_add(
        2, few_rows(x), x[:, :, :2], alpha=torch.tensor(2.0)
    ),
    "dropout of recurrent layers": drop_out,
}
FAMILIES["others"] = OTHERS

# By the name of the operator.
RUN_WHOLE = {
    "grid_sampler_2d": lambda m, x: F.grid_sample(x, points_of_a_grid(x), align_corners=True),
    "_upsample_bilinear2d_aa": narrow,
}
