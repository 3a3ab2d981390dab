"""What Python reads of tensors of the globe, and what uses their memory past torch's operators."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.band_tensor import values
from credit_dp.domain_parallel.band_tensor.boundary import Enter, attach_domain
from credit_dp.domain_parallel.band_tensor.tensor import WHOLE, Band, BandTensor, Domain
from credit_dp.errors import UserError
from tests.ranks import cpu_only, on_processes, on_threads, seeded
from tests.tables import entry

SHAPE = (2, 8, 7, 6)


class Model(nn.Module):
    """Keeps what a function returns of a field."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.found: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.found = self.function(x)
        return x * 1


def _on_rank(manager: DomainParallelManager, function: Callable[[Any], Any], x: Tensor) -> Any:
    model = Model(function)
    domain = attach_domain(model, manager, [SHAPE])
    model(shard_tensor(x, manager=manager).clone())
    return model.found, dict(domain.whole_calls)


def run(function: Callable[[Any], Any], ranks: int = 3) -> list[Any]:
    """Return what a function of a field returns on each rank."""
    x = torch.randn(SHAPE, generator=seeded(0), dtype=torch.float64)
    return [found for found, _ in on_threads(ranks, _on_rank, function, x)]


def assign_by_mask(score: Tensor) -> Tensor:
    score = score * 1
    score[score > 0.5] = 1
    return score


DECIDE: list[Callable[[Any, Any], Any]] = [
    lambda score, x: score.max().item(),
    lambda score, x: score.tolist(),
    lambda score, x: [bool(s > 0.5) for s in score],
    lambda score, x: [float(s) for s in score],
    lambda score, x: [int(s * 2**52) for s in score],
    lambda score, x: complex(score[3]),
    lambda score, x: list(range(9))[(score[2] > 0.5).long()],
    lambda score, x: torch.tensor([score[1], score[2]], dtype=torch.float64).tolist(),
    lambda score, x: score.equal(torch.full_like(score, 0.5)),
    lambda score, x: torch.allclose(score, torch.full_like(score, 0.5), rtol=0, atol=0),
    lambda score, x: (score > 0.5).nonzero().tolist(),
    lambda score, x: torch.argwhere(score > 0.5).tolist(),
    lambda score, x: (score.unique().tolist(), torch.unique(score).tolist()),
    lambda score, x: torch.unique(score[:, None] > 0.5, dim=0).shape,
    lambda score, x: score.unique_consecutive().tolist(),
    lambda score, x: len(torch.masked_select(score, score > 0.5)),
    lambda score, x: len(torch.where(score > 0.5)[0]),
    lambda score, x: 0.5 + 3e-15 in score,
    lambda score, x: len(torch.bincount((score > 0.5).long())),
    lambda score, x: score.repeat_interleave((score > 0.5).long()).shape,
    lambda score, x: len(score[score > 0.5]),
    lambda score, x: x[:, :7][:, score > 0.5].shape,
    lambda score, x: F.one_hot((score > 0.5).long()).shape,
    lambda score, x: assign_by_mask(score).tolist(),
    lambda score, x: x[:, :, score.argsort()].sum((1, 2, 3)).tolist(),
    lambda score, x: x.index_select(2, score.argsort())[0, 0, :, 0].tolist(),
    lambda score, x: f"{score[4]:.17f}",
    lambda score, x: score.numpy(force=True).tolist(),
    lambda score, x: np.asarray(score).tolist(),
]


def test_ranks_decide_by_the_values_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where the last bit of what each rank computes may differ."""
    monkeypatch.setattr(values, "SAME_BITS", ())

    def function(x: Any) -> list[Any]:
        sign = (1, -1, 0)[x.domain.rank]
        score = 0.5 + sign * 1e-15 * torch.arange(7, dtype=torch.float64)
        return [decide(BandTensor(score.clone(), WHOLE, x.domain), x) for decide in DECIDE]

    for i, of_ranks in enumerate(zip(*run(function), strict=True)):
        assert of_ranks == (of_ranks[0],) * 3, f"{i} of DECIDE"


READ: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.max().item(),
    "one row": lambda x: x[0, 0, 3, 0].item(),
    "list": lambda x: x[0].tolist(),
    "array": lambda x: np.asarray(x).sum(),
    "truth": lambda x: bool(x.max() > 1),
    "equal": lambda x: (torch.equal(x, x + 0), torch.equal(x, x[:, :, :3]), x.equal(x.flip(2))),
    "close": lambda x: (torch.allclose(x, x + 1e-12), torch.allclose(x, x.flip(2))),
    "nonzero": lambda x: (x > 1).nonzero().tolist(),
    "selected": lambda x: x.masked_select(x > 1).tolist(),
    "unique": lambda x: x.round().unique(return_counts=True)[1].tolist(),
    "largest": lambda x: x.flatten().topk(3)[1].tolist(),
    "texts": lambda x: f"{x.mean():>9.3f}",
    "length": lambda x: (len(x), x.shape, x.numel(), x.stride(), x.is_contiguous()),
}


def test_values_are_those_of_one_process() -> None:
    x = torch.randn(SHAPE, generator=seeded(0), dtype=torch.float64)
    for name, read in READ.items():
        with entry(name):
            expected = read(x)
            for found in run(read):
                if isinstance(expected, float):
                    assert found == pytest.approx(expected, rel=1e-13)
                else:
                    assert found == expected


def _read_types(manager: DomainParallelManager) -> Any:
    def function(x: Any) -> list[Any]:
        mean = x.mean((0, 2, 3))
        types = (torch.int16, torch.bool, torch.complex64, torch.bfloat16, torch.uint8)
        return [(mean.abs() * 9).to(dtype).tolist() for dtype in types]

    values.SAME_BITS = ()
    try:
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        return _on_rank(manager, function, x)[0]
    finally:
        values.SAME_BITS = ("cpu", "meta")


def test_values_of_all_types_are_read_on_processes() -> None:
    results = on_processes(3, _read_types)
    assert results == results[:1] * 3


def test_one_rank_may_print_what_it_holds() -> None:
    def function(x: Any) -> str:
        mean = x.mean()
        return "" if x.domain.rank else f"{x} {mean} {mean!r} {x!s}"

    assert "BandTensor" in run(function)[0]


@cpu_only("NumPy has no arrays on GPUs")
def test_what_is_written_to_arrays_is_not_lost() -> None:
    def write(x: Any) -> Any:
        whole = x.mean((2, 3)).detach()
        mean = BandTensor(whole.read_values(), WHOLE, x.domain)
        mean.numpy()[0, 0] = 7.0
        for array in (np.asarray(x), x[:, :, :2].numpy()):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        return mean[0, 0].item()

    assert run(write) == [7.0] * 3


MEMORY: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "__dlpack__": torch.from_dlpack,
    "__dlpack__ ": np.from_dlpack,
    "share_memory_": lambda x: x.share_memory_(),
    "__cuda_array_interface__": lambda x: x.__cuda_array_interface__,
    "pickle": pickle.dumps,
    "pickle ": lambda x: torch.save(x, io.BytesIO()),
    "set_": lambda x: x.detach().set_(torch.ones(2, dtype=x.dtype)),
    "resize_": lambda x: x.detach().clone().resize_(2, 3),
    "copy.deepcopy": lambda x: copy.deepcopy(x * torch.ones((), requires_grad=True)),
}


def test_what_needs_the_memory_of_the_globe_is_refused() -> None:
    def function(x: Any) -> list[str]:
        messages = []
        for use in MEMORY.values():
            with pytest.raises(UserError) as error:
                use(x)
            messages.append(str(error.value))
        return messages

    for found in run(function):
        assert [message.split(":")[0] for message in found] == [name.strip() for name in MEMORY]
        assert not any("\n" in message for message in found)


def test_copies_and_data_are_those_of_one_process() -> None:
    def change(x: Any) -> Any:
        y = copy.deepcopy(x.detach())
        y.data = y.data * 2
        y.mul_(3)
        other = x.detach() * 1
        other.data = torch.ones(3, dtype=x.dtype)
        return (y - 6 * x).abs().max().item(), other.sum().item()

    assert run(change) == [(0.0, 3.0)] * 3


def test_fields_of_no_model_may_be_read_anywhere() -> None:
    def on_rank(manager: DomainParallelManager) -> Any:
        return float(BandTensor(torch.ones(()), WHOLE, Domain(manager)) + 1)

    assert on_threads(2, on_rank) == [2.0, 2.0]


def test_ranks_forget_what_was_read_with_its_memory() -> None:
    """Other memory at its address would else be read again on some ranks, and waited for."""

    def run(manager: DomainParallelManager) -> None:
        domain = Domain(manager)
        x = Enter.apply(torch.ones(1, 2, 3, 4), Band(-2, 1, (0, 3, 6)), domain)
        kept = x.data, (x * 2).numpy(), (x * 3).data
        assert x.local.untyped_storage() in domain.uncounted
        del kept
        assert x.local.untyped_storage() in domain.uncounted
        del x
        gc.collect()
        assert not domain.uncounted

    on_threads(2, run)


def test_a_copy_of_a_model_knows_nothing_of_what_the_model_has_read() -> None:
    domain = Domain(DomainParallelManager(1, 1))
    kept = domain.read, domain.reduced, domain.folds, domain.sizes_before
    domain.uncounted.add(torch.zeros(1).untyped_storage())
    for made in (copy.deepcopy(domain), pickle.loads(pickle.dumps(domain))):  # noqa: S301
        assert not made.uncounted
        own = made.read, made.reduced, made.folds, made.sizes_before
        assert not any(a is b for a, b in zip(own, kept, strict=True))
