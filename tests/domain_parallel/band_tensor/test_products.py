"""Products, attention, Fourier transforms and recurrent layers on tensors of the globe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import Enter, attach_domain
from credit_dp.domain_parallel.band_tensor.moving import cut, whole
from credit_dp.domain_parallel.band_tensor.products import best_cut
from credit_dp.domain_parallel.band_tensor.tensor import PARTIAL, WHOLE, Band, BandTensor, Domain
from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.functions import CHANNELS
from tests.ranks import on_threads
from tests.tables import entry

SDPA = F.scaled_dot_product_attention
# Of torch, about copies of recurrent weights on GPUs.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")
# Operators that are to compute on bands here; others have tests of their own.
OWN = (
    *(
        "mm",
        "bmm",
        "mv",
        "dot",
        "vdot",
        "addmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "addr",
        "_trilinear",
    ),
    *("_addmm_activation", "_cdist_forward", "_cdist_backward", "_euclidean_dist", "linear"),
    *("linalg_inv_ex", "linalg_solve_triangular", "_linalg_solve_ex", "linalg_lu_solve"),
    *("_linalg_det", "linalg_cholesky_ex", "_linalg_check_errors", "_linalg_eigh"),
    *("_fft_c2c", "_fft_r2c", "_fft_c2r", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_native_multi_head_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu_backward", "_transformer_encoder_layer_fwd"),
)


class OfOwn(Mapping[str, int]):
    """The counts of operators of this family that run whole."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = counts

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    def __iter__(self):
        return (name for name in self.counts if name in OWN)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def compute_below_autograd(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[tuple[int, ...]]
) -> Mapping[str, int]:
    return OfOwn(attach_domain(model, manager, shapes).whole_calls)


@pytest.fixture(autouse=True)
def below_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "compute_on_bands", compute_below_autograd)


def square(x: Tensor) -> Tensor:
    """Return a matrix for each row and column, far from singular."""
    matrix = x.permute(0, 2, 3, 1)[..., :3, None] * x.permute(0, 2, 3, 1)[..., None, 3:6] / 4
    return matrix + 4 * torch.eye(3, dtype=x.dtype)


def symmetric(x: Tensor) -> Tensor:
    return square(x) @ square(x).mT


def repeated(x: Tensor) -> Tensor:
    """Return a field with its rows twice, of which ranks have bands of both."""
    return torch.stack([x, x * 2], 2).flatten(2, 3)


def in_place(m: nn.Module, x: Tensor) -> Tensor:
    y = x[0] * 1
    return y.baddbmm_(x[1], m.matrix[:6, :6].expand(CHANNELS, 6, 6), beta=0.5, alpha=2.0)


PRODUCTS = {
    "added": lambda m, x: (
        torch.addmm(m.scale[:6], x[0, 0], m.matrix[:6, :6]),
        torch.addmm(x[0, 0], x[0, 1], m.matrix[:6, :6], beta=0.3, alpha=2),
        torch.addmm(m.matrix[:6, :6], x[0, 0].mT, x[0, 1], beta=0.3, alpha=2),
        torch.addmm(m.scale[:1], x[0, 0].mT, m.rows[: x.shape[2]]),
        torch.addmm(x[0, 0], m.rows[: x.shape[2]], m.matrix[:6, :6]),
        torch.baddbmm(x[0], x[1], m.matrix[:6, :6].expand(CHANNELS, 6, 6)),
        torch.baddbmm(m.scale[:6], x[0].mT, x[1], beta=2),
        torch.addbmm(m.matrix[:6, :6], x[0].mT, x[1]),
        torch.addbmm(x[0, 0] @ x[0, 0].mT, x[1], x[0].mT, beta=0.5),
        torch.addmv(x[0, 0, :, 0], x[0, 0], m.scale[:6]),
        torch.addmv(m.scale[:6], x[0, 0].mT, m.rows[: x.shape[2], 0], beta=0.5),
        torch.addr(m.rows[: x.shape[2]], x[0, 0, :, 0], m.scale[:6]),
    ),
    "in place": in_place,
    "vectors": lambda m, x: (
        x[0, 0, :, 0].vdot(x[0, 1, :, 1]),
        x[0, 0, :, 0].dot(m.rows[: x.shape[2], 0]),
    ),
    "sums of parts": lambda m, x: (
        (x[0].mT @ x[1]) @ m.matrix[:6, :6] @ x[0].mT,
        m.matrix[:6, :6] @ (x[0].mT @ x[1]) @ (x[1].mT @ x[0]),
        torch.addmm(m.scale[:6], x[0, 0].mT @ x[0, 1], m.matrix[:6, :6]),
    ),
    "folded": lambda m, x: (
        F.linear(x.permute(0, 2, 3, 1).reshape(-1, CHANNELS), m.matrix, m.scale),
        x.permute(1, 0, 2, 3).flatten(1) @ x.permute(0, 2, 3, 1).flatten(0, 2),
    ),
    "bilinear": lambda m, x: (
        F.bilinear(x.movedim(1, -1), x.movedim(1, -1) * 2, m.matrix.expand(3, -1, -1), m.scale[:3]),
        F.bilinear(x.mT, m.rows[: x.shape[2], :3].T.expand(2, CHANNELS, 3, -1).repeat(1, 1, 2, 1),
                   torch.ones(2, x.shape[2], x.shape[2], dtype=x.dtype) / 9),
    ),
    "sparse": lambda m, x: (
        torch.eye(x.shape[2], dtype=x.dtype)[:1].to_sparse() @ x[0, 0],
        torch.eye(CHANNELS, dtype=x.dtype).to_sparse() @ x[0].flatten(1),
    ),
    "kron": lambda m, x: torch.kron(x[0, 0], m.matrix[:2, :3]),
    "matrices": lambda m, x: (
        torch.linalg.inv(square(x)),
        torch.linalg.det(square(x)),
        torch.linalg.solve(square(x), x.permute(0, 2, 3, 1)[..., :6].unflatten(-1, (3, 2))),
        torch.linalg.solve_triangular(square(x), square(x) * 2, upper=True),
        torch.linalg.cholesky(symmetric(x)),
        torch.linalg.eigh(symmetric(x))[0],
    ),
}  # fmt: skip


def four(x: Tensor, heads: int = 2) -> Tensor:
    """Return contiguous `(samples, heads, tokens, features)` with rows among tokens."""
    return x.flatten(2).mT.contiguous().unflatten(-1, (heads, -1)).transpose(1, 2)


def fused(x: Tensor, heads: int, **options: object) -> Tensor:
    q = four(x, heads)
    return SDPA(q, q * 2, q * 3, **options)


def masked(m: nn.Module, x: Tensor, heads: int = 2) -> list[Tensor]:
    q, count = four(x, heads), x[0, 0].numel()
    mask = torch.linspace(-1, 1, count * count, dtype=x.dtype).view(count, count)
    few = torch.ones(1, count, dtype=torch.bool).index_fill(1, torch.arange(3, count), False)
    none = torch.ones(count, count, dtype=torch.bool).index_fill(0, torch.arange(4), False)
    of_heads = mask.expand(2, heads, -1, -1) * torch.arange(1.0, 1 + heads)[:, None, None]
    return [SDPA(q, q * 2, q * 3, attn_mask=each) for each in (mask, mask > 0, few, none, of_heads)]


def class_queries(m: nn.Module, x: Tensor) -> list[Tensor]:
    q, k = m.matrix[None, None, :3, :4].expand(2, 2, 3, 4), four(x)
    mask = torch.ones(3, k.shape[2], dtype=torch.bool).tril(20)
    mask[0, 4:] = False
    mask[1] = False
    return [SDPA(q, k, k * 2), SDPA(q, k, k * 2, attn_mask=mask), SDPA(q, k, k, scale=0.1)]


FUSED = {
    "heads": lambda m, x: (fused(x, 2), fused(x, 8), fused(x, 4, scale=0.2)),
    "causal": lambda m, x: (fused(x, 2, is_causal=True), fused(x, 4, is_causal=True)),
    "causal with few keys": lambda m, x: (
        SDPA(four(x), four(x)[:, :, :7], four(x)[:, :, :7], is_causal=True),
        SDPA(four(x)[:, :, :7], four(x), four(x), is_causal=True),
    ),
    "causal folded": lambda m, x: fused(repeated(x), 2, is_causal=True),
    "masks": masked,
    "masks of heads": partial(masked, heads=4),
    "class queries": class_queries,
    "grouped": lambda m, x: (
        SDPA(four(x, 8), four(x, 8)[:, :2], four(x, 8)[:, 2:4], enable_gqa=True),
        SDPA(four(x, 8).transpose(1, 2), *[four(x, 8).transpose(1, 2)[:, :, :4]] * 2),
    ),
    "samples": lambda m, x: SDPA(*[x.transpose(0, 2).contiguous()] * 3),
    "windows": lambda m, x: SDPA(*[x.permute(2, 0, 3, 1).contiguous().unflatten(-1, (2, 4))] * 3),
    "features": lambda m, x: (
        SDPA(*[x.mT.contiguous()] * 3),
        SDPA(m.rows.expand(2, 8, -1, -1), m.rows[:6].expand(2, 8, -1, -1), x.mT.contiguous()),
        SDPA(x, x * 2, x[..., :3]),
    ),
    "keys and values alone": lambda m, x: (
        SDPA(
            m.rows[None, None, :5, :4],
            four(x)[:1, :1],
            m.rows.repeat(5, 1)[None, None, : x[0, 0].numel(), :4],
        ),
        SDPA(four(x), m.rows[None, None, :5, :4].expand(2, 2, 5, 4), four(x)[:, :, :5]),
    ),
}  # fmt: skip


def few_frequencies(m: nn.Module, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x)
    kept = torch.zeros_like(spectrum)
    kept[:, :, :3, :2] = spectrum[:, :, :3, :2] * 2
    return torch.fft.irfft2(kept, s=x.shape[-2:])


TRANSFORMS = {
    "of a real field": lambda m, x: (
        torch.fft.rfft(x, dim=2),
        torch.fft.rfftn(x, dim=(3, 2)),
        torch.fft.fft(x, dim=2, norm="ortho"),
        torch.fft.fft2(x.mT),
        torch.fft.ihfft(x, dim=2).resolve_conj(),
        torch.fft.rfftn(x, dim=(1, 2, 3), norm="forward"),
    ),
    "to a real field": lambda m, x: (
        torch.fft.irfft(x + 1j * x.flip(1), n=x.shape[2], dim=2),
        torch.fft.irfftn(x + 1j * x.flip(1), dim=(3, 2)),
        torch.fft.irfftn(x + 1j * x.flip(1), dim=(1, 2, 3)),
        torch.fft.hfft(x + 1j * x.flip(1), dim=2),
    ),
    "few frequencies": few_frequencies,
    "folded": lambda m, x: torch.fft.fft(repeated(x), dim=2),
}

TABLES = {
    "products": PRODUCTS,
    "attention": FUSED,
    "transforms": TRANSFORMS,
}


def test_some_of_each_kind() -> None:
    few = {
        "added": PRODUCTS["added"],
        "heads": FUSED["heads"],
        "fields": TRANSFORMS["to a real field"],
    }
    functions.check_table(few | {"masks": masked, "causal": FUSED["causal"]}, 3)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("ranks", [3, 4])
def test_functions_are_those_of_the_globe(table: str, ranks: int) -> None:
    functions.check_table(TABLES[table], ranks)


# ---------------------------------------------------------------- other bands than the planned ones


# Even, of one row, and empty ones.
BOUNDS = [(0, 5, 9, 12), (0, 1, 11, 12), (0, 0, 12, 12), (0, 12, 12, 12)]
Program = Callable[[Tensor, Tensor], list[Tensor]]


def gradients(program: Program, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return results of a program and their gradients."""
    found = program(x, weight)
    total = sum(((i + 1) * y.abs().square()).sum() for i, y in enumerate(found))
    return [*found, *torch.autograd.grad(total, (x, weight))]


def on_rank(
    manager: DomainParallelManager,
    program: Program,
    x: Tensor,
    weight: Tensor,
    bounds: tuple[int, ...],
) -> tuple[list[Tensor], set[str]]:
    band, domain = Band(-2, 1, bounds), Domain(manager)
    local = cut(x.detach(), band, domain.rank).clone()
    field = Enter.apply(local, band, domain).requires_grad_()
    w = BandTensor(weight.detach(), WHOLE, domain).requires_grad_()
    results = [whole(y.detach()) for y in gradients(program, field, w)]
    return results, set(OfOwn(domain.whole_calls))


def assert_on_bounds(
    program: Program, dtype: torch.dtype = torch.float64, rtol: float = 1e-10
) -> None:
    generator = torch.manual_seed(0)
    x = torch.randn(2, CHANNELS, 12, 6, dtype=torch.float64, generator=generator)
    weight = torch.randn(CHANNELS, CHANNELS, dtype=torch.float64, generator=generator)
    x, weight = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    expected = gradients(program, x, weight)
    for bounds in BOUNDS:
        with entry(str(bounds)):
            for found, whole_calls in on_threads(3, on_rank, program, x, weight, bounds):
                assert not whole_calls
                for value, wanted in zip(found, expected, strict=True):
                    assert value.dtype == wanted.dtype
                    scale = float(wanted.detach().abs().max())
                    torch.testing.assert_close(value, wanted.detach(), rtol=rtol, atol=rtol * scale)


def products(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [
        F.linear(x.movedim(1, -1), weight),
        x.mT @ x,
        x @ x.mT,
        torch.einsum("bchw,cd->bdhw", x, weight),
        torch.addmm(weight[:6, :6], x[0, 0].mT, x[0, 1]),
        torch.cdist(x.flatten(2).mT, weight),
    ]


def matrices(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [torch.linalg.solve(square(x), square(x).mT) @ weight[:3, :3]]


def attention(x: Tensor, weight: Tensor) -> list[Tensor]:
    q, windows = four(x), x.permute(2, 0, 3, 1).contiguous()
    three = four(x[:, :6], 3)  # heads of which each rank has one
    return [
        SDPA(three, three * 2, three * 3),
        SDPA(three, three, three, is_causal=True),
        SDPA(q, q * 2, q * 3),
        SDPA(q, q, q, is_causal=True),
        SDPA(four(x, 4), four(x, 4), four(x, 4), is_causal=True),
        SDPA(weight[None, None, :, :4].expand(2, 2, -1, -1), q, q * 2),
        SDPA(windows, windows * 2, windows),
    ]


def attention_of_copies(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Attend so that backward gets copies of what it needs, as where these are kept on disk."""
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, torch.clone):
        return attention(x, weight)


def spectra(x: Tensor, weight: Tensor) -> list[Tensor]:
    y = torch.fft.rfft2(x)
    return [y, torch.fft.irfft2(y, s=x.shape[-2:]), torch.fft.rfft(x) * weight[0, 0]]


@pytest.mark.parametrize("program", [products, matrices, attention, attention_of_copies, spectra])
def test_bands_may_be_empty(program: Program) -> None:
    assert_on_bounds(program)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_are_as_good_as_those_of_one_process(dtype: torch.dtype) -> None:
    assert_on_bounds(lambda x, w: [products(x, w)[0], *attention(x, w)], dtype, 3e-2)


def curvature(x: Tensor, weight: Tensor) -> list[Tensor]:
    y = (F.linear(x.movedim(1, -1), weight).tanh() @ weight).sum()
    y = y + torch.fft.rfft2(x).abs().square().sum() + (x.mT @ x).sin().sum()
    return list(torch.autograd.grad(y, (x, weight), create_graph=True))


def test_gradients_of_gradients() -> None:
    assert_on_bounds(curvature)


# ---------------------------------------------------------------- layers in one operator


class Layers(nn.Module):
    """Layers for which torch has one operator, without gradients or in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(CHANNELS, 5, 2, bidirectional=True)
        self.attention = nn.MultiheadAttention(CHANNELS, 2, batch_first=True)
        self.first = nn.TransformerEncoderLayer(
            CHANNELS, 2, 8, 0.0, batch_first=True, norm_first=True
        )
        self.last = nn.TransformerEncoderLayer(CHANNELS, 2, 8, 0.0, "gelu", batch_first=True)
        self.linear = nn.Linear(CHANNELS, 3)

    def recurrent(self, x: Tensor) -> list[Tensor]:
        by_columns = self.lstm(x.permute(3, 0, 2, 1).flatten(1, 2))
        by_rows = self.lstm(x.permute(2, 0, 3, 1).flatten(1, 2))
        few = self.lstm(x[:1, :, :, :1].permute(2, 0, 3, 1).flatten(1, 2))[0]
        return [by_columns[0], *by_columns[1], by_rows[0], *by_rows[1], few]

    def forward(self, x: Tensor) -> list[Tensor]:
        tokens = x.flatten(2).mT.contiguous()
        count = tokens.shape[1]
        causal = torch.ones(count, count, dtype=torch.bool).triu(1)
        padding = torch.arange(count)[None].expand(2, -1) > count - 5
        return [
            *self.attention(tokens, tokens, tokens),
            *self.attention(tokens, tokens, tokens, average_attn_weights=False, attn_mask=causal),
            self.attention(tokens, tokens, tokens, need_weights=False)[0],
            self.first(tokens),
            self.last(tokens, src_key_padding_mask=padding),
            self.last(tokens, src_mask=causal),
            self.linear(tokens),
            *self.recurrent(x)[:-1],
        ]


def computed(
    manager: DomainParallelManager,
    x: Tensor,
    model: Layers,
    bounds: tuple[int, ...],
    inference: bool,
) -> tuple[list[Tensor], set[str]]:
    band, domain = Band(-2, 1, bounds), Domain(manager)
    with torch.inference_mode(inference), torch.no_grad():
        field = Enter.apply(cut(x, band, domain.rank).clone(), band, domain)
        results = [whole(y) for y in model(field)]
    return results, set(OfOwn(domain.whole_calls))


@pytest.mark.parametrize("inference", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_without_gradients(inference: bool) -> None:
    torch.manual_seed(0)
    model, x = Layers().eval().double(), torch.randn(2, CHANNELS, 12, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
    for bounds in BOUNDS:
        for found, whole_calls in on_threads(3, computed, x, model, bounds, inference):
            assert not whole_calls
            for value, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-12)


def trained(
    manager: DomainParallelManager, x: Tensor, model: Layers, bounds: tuple[int, ...]
) -> tuple[Tensor, list[Tensor], set[str]]:
    band, domain = Band(-2, 1, bounds), Domain(manager)
    local = cut(x, band, domain.rank).clone().requires_grad_()
    field = Enter.apply(local, band, domain)
    loss = sum((i + 1) * y.sin().sum() for i, y in enumerate(model.recurrent(field)))
    grads = torch.autograd.grad(loss, (field, *model.lstm.parameters()))
    return [whole(grad) for grad in grads], set(OfOwn(domain.whole_calls))


def test_recurrent_layers_of_single_precision() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, CHANNELS, 12, 6, requires_grad=True)
    loss = sum((i + 1) * y.sin().sum() for i, y in enumerate(model.recurrent(x)))
    expected = torch.autograd.grad(loss, (x, *model.lstm.parameters()))
    for bounds in BOUNDS:
        for found, whole_calls in on_threads(3, trained, x.detach(), model, bounds):
            # Rows are steps of one sample.
            assert whole_calls == {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
            for value, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- what is sent


def cut_of(labels: str, shapes: Sequence[tuple[int, ...]], rows: Sequence[int | None]) -> str:
    """Return which letter of a product is cut, of operands with bands in these dimensions."""
    factors, out = labels.split("->")
    names = tuple(factors.split(","))
    bands = tuple(
        None if dim is None else Band(dim, 1, (0, 1, 2, shape[dim]))
        for dim, shape in zip(rows, shapes, strict=True)
    )
    first = next(i for i, band in enumerate(bands) if band is not None)
    parts = tuple((n,) for n in shapes[first])
    found = best_cut(names, out, tuple(shapes), bands, 3, parts, "")
    return found.label


def test_products_are_cut_where_least_is_sent() -> None:
    for expected, labels, shapes, rows in [
        ("y", "yk,kz->yz", [(90, 8), (8, 8)], (-2, None)),  # a linear layer
        ("k", "yk,kz->yz", [(8, 90), (90, 8)], (-1, -2)),  # the gradient of its weights
        ("k", "yk,kz->yz", [(8, 90), (90, 8)], (-1, None)),  # few sums over rows
        ("y", "yk,kz->yz", [(90, 90), (90, 90)], (-1, None)),  # many: bands move
        ("b", "byk,bkz->byz", [(6, 90, 8), (6, 8, 90)], (-2, -1)),  # scores of many heads
        ("y", "byk,bkz->byz", [(1, 90, 8), (1, 8, 90)], (-2, -1)),  # and of one
        ("z", "byk,bkz->byz", [(1, 9, 8), (1, 8, 90)], (-2, -1)),  # of few queries
        ("b", "byk,bkz->byz", [(9, 4, 40), (9, 40, 40)], (-1, None)),  # a Legendre transform
    ]:
        with entry((labels, shapes, rows)):
            assert cut_of(labels, shapes, rows) == expected


def sent_on_rank(
    manager: DomainParallelManager, function: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[float, float]:
    """Return what a rank sends forward and backward, relative to the field."""
    domain, traffic = Domain(manager), manager.transport.traffic
    band = Band(-2, 1, domain.bounds(x.shape[-2]))
    local = cut(x, band, domain.rank).clone()
    field = Enter.apply(local, band, domain).requires_grad_()
    y = function(field)
    forward = traffic.bytes
    torch.autograd.grad(y, field, Enter.apply(torch.ones_like(local), band, domain))
    return forward / x.nbytes, (traffic.bytes - forward) / x.nbytes


@pytest.mark.parametrize(
    ("heads", "sent"),
    [
        # Each rank has queries, keys and values of its heads, and sends results back.
        (8, 4 * 3 / 16),
        # Pairs of ranks share a head: its keys and values are sent to both.
        (2, 2 * (1 / 4 * 1 / 2) + 2 * (1 / 4 * 3 / 2)),
        # With one head keys and values are sent to all.
        (1, 2 * 3 / 4),
    ],
)
def test_attention_sends_what_its_heads_need(heads: int, sent: float) -> None:
    def attend(x: Tensor) -> Tensor:
        return fused(x, heads).transpose(1, 2).flatten(2).mT.reshape(x.shape)

    x = torch.ones(1, 16, 16, 6)
    assert on_threads(4, sent_on_rank, attend, x) == [pytest.approx((sent, sent))] * 4


def test_transforms_of_rows_move_bands_to_columns_and_back() -> None:
    x = torch.ones(2, CHANNELS, 12, 6, dtype=torch.complex64)
    sent = 2 * 1 / 3 * 2 / 3
    for found in on_threads(3, sent_on_rank, lambda x: torch.fft.ifft2(torch.fft.fft2(x)), x):
        assert found == pytest.approx((sent, sent))


@pytest.mark.parametrize("orders", [12, 2])
def test_products_over_rows_move_bands_or_are_summed(orders: int) -> None:
    matrix = torch.linspace(-1, 1, 12 * orders).view(orders, 12).cos()

    def mix(x: Tensor) -> Tensor:
        spectrum = torch.einsum("bchw,gh->bcgw", x, matrix)
        return torch.einsum("bcgw,gh->bchw", spectrum, matrix)

    # To bands of channels, or a sum of few rows.
    sent = 1 / 3 * 2 / 3 if orders == 12 else 0
    for found in on_threads(3, sent_on_rank, mix, torch.ones(2, 6, 12, 6)):
        # The result stays in these bands. Its gradient is in rows, to which that of the field
        # returns.
        assert found == pytest.approx((sent, 2 * sent))


def test_parts_are_summed_up_once() -> None:
    def on_one(manager: DomainParallelManager, bias: Tensor, factors: Tensor) -> Tensor:
        domain = Domain(manager)
        parts = [BandTensor(x / 3, PARTIAL, domain) for x in (bias, factors)]
        total: Tensor = whole(torch.addmm(parts[0], parts[1], factors, beta=2))
        return total

    bias, factors = torch.rand(4, 4).double(), torch.rand(4, 4).double()
    for found in on_threads(3, on_one, bias, factors):
        torch.testing.assert_close(found, torch.addmm(bias, factors, factors, beta=2))
