"""Results cached by shape equal torch's, and are never used for other inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from credit_dp.domain_parallel.planning.shape_memo import ShapeMemo
from tests.ranks import DEVICE, cpu_only

aten = torch.ops.aten


class _Counted:
    """An operation that counts how often it runs."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self.func, self.runs = func, 0
        self._schema, self.namespace, self.tags = func._schema, func.namespace, func.tags

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.runs += 1
        return self.func(*args, **kwargs)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.slow
def test_equal_operands_run_once_and_make_tensors_of_their_own() -> None:
    norm, memo = _Counted(aten.native_layer_norm.default), ShapeMemo()
    made = [memo.run(norm, (meta(2, 3, 4), [4], meta(4), meta(4), 1e-5), {}) for _ in range(3)]
    assert norm.runs == 1
    described = [[(x.shape, x.stride(), x.dtype, x.device) for x in of_run] for of_run in made]
    assert described[0] == described[1] == described[2]
    assert len({x.untyped_storage()._cdata for of_run in made for x in of_run}) == 9


def test_what_differs_runs_again() -> None:
    for first, second in [
        ((meta(2, 3), 1), (meta(2, 4), 1)),
        ((meta(2, 3), 1), (meta(3, 2).t(), 1)),
        ((meta(2, 3), 1), (meta(2, 3, dtype=torch.float64), 1)),
        ((meta(2, 3, dtype=torch.int64), 1), (meta(2, 3, dtype=torch.int64), 1.0)),
    ]:
        mul, memo = _Counted(aten.mul.Tensor), ShapeMemo()
        for operands in (first, second, first, second):
            made, expected = memo.run(mul, operands, {}), mul.func(*operands)
            found = (made.shape, made.stride(), made.dtype)
            assert found == (expected.shape, expected.stride(), expected.dtype), second
        assert mul.runs == 2, second


@pytest.mark.slow
def test_a_new_default_dtype_runs_again() -> None:
    empty, memo, before = aten.zeros.default, ShapeMemo(), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert memo.run(empty, ([2],), {"device": torch.device("meta")}).dtype == dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
def test_views_and_changes_reach_the_operand() -> None:
    memo, x = ShapeMemo(), meta(4, 6)
    for func, args in ((aten.t.default, (x,)), (aten._unsafe_view.default, (x, [24]))):
        for _ in range(2):
            made = memo.run(func, args, {})
            assert made.untyped_storage()._cdata == x.untyped_storage()._cdata
    for version in (1, 2):
        assert memo.run(aten.add_.Tensor, (x, 1), {}) is x
        assert x._version >= version


def test_data_is_never_remembered() -> None:
    memo = ShapeMemo()
    made = [memo.run(aten.add.Tensor, (torch.full((2,), n), 1), {}) for n in (1, 2)]
    assert [x.tolist() for x in made] == [[2, 2], [3, 3]]


def fakes(mode: FakeTensorMode, *shape: int, number: int = 1) -> list[Tensor]:
    with mode:
        return [torch.empty(shape) for _ in range(number)]


def operations() -> list[tuple[torch._ops.OpOverload, tuple[object, ...]]]:
    x, weight, index = torch.randn(2, 4, 6, 6), torch.randn(4), torch.tensor([1, 0])
    channels_last = x.to(memory_format=torch.channels_last)
    kernel = torch.randn(5, 4, 3, 3)
    # With a kernel that is a view, of one entry, and of one channel, of which strides say less.
    convolutions = [
        (y, part, groups)
        for y in (x, channels_last, x[..., :1, :1], x.transpose(2, 3), x[..., ::2])
        for part, groups in (
            (kernel[:, :, :1, :1], 1),
            (kernel[..., :1, :].to(memory_format=torch.channels_last)[..., :1], 1),
            (kernel[:4, :1, :1, :1], 4),
            (kernel[:4, :1, 1:2, 1:2].contiguous(), 4),
        )
    ]
    ones, zeros = [1, 1], [0, 0]
    convolution = aten.convolution.default
    found = [
        (
            aten.native_batch_norm.default,
            (x, weight, weight, weight, weight.exp(), True, 0.1, 1e-5),
        ),
        (aten.native_group_norm.default, (x, weight, weight, 2, 4, 36, 2, 1e-5)),
        (aten.mean.dim, (x.transpose(1, 3), [1, 2], True)),
        (aten.add.Tensor, (channels_last, weight[:, None, None].double())),
        (aten.cat.default, ([x, x.double()], -1)),
        (aten.max_pool2d_with_indices.default, (x, [2, 2])),
        (aten.upsample_bilinear2d.default, (x, [9, 11], False)),
        (aten.index_select.default, (x, 1, index)),
        (aten.slice.Tensor, (x, 2, 1, 5, 2)),
        (aten.split.Tensor, (x, 4, 3)),
        (aten.native_layer_norm.default, (x.transpose(1, 2), [6], None, None, 1e-5)),
        (aten.native_layer_norm.default, (x.bfloat16(), [6], None, None, 1e-5)),
        (aten._to_copy.default, (x,)),
        (aten.new_zeros.default, (x, [3, 4])),
        (aten.zeros_like.default, (x.transpose(1, 2),)),
        (aten.zeros.default, ([3, 4],)),
        (aten.nonzero.default, (index,)),  # depends on data: fake tensors refuse it
        (aten.add.Tensor, (x, x[..., :5])),  # has no result
        (aten.reflection_pad2d.default, (channels_last, [1, 1, 1, 1])),
        (aten.replication_pad2d.default, (channels_last, [1, 1, 1, 1])),
        (aten.pixel_shuffle.default, (channels_last, 2)),
        # No results: too few channels, and a bias that does not fit.
        (convolution, (x, kernel, None, ones, ones, ones, True, zeros, 1)),
        (convolution, (x, kernel, weight, ones, ones, ones, False, zeros, 1)),
        (convolution, (x[0], kernel[:, :, 0], None, [1], [1], [1], False, [0], 1)),
        (
            aten.convolution_backward.default,
            (x[:, :1], x, kernel[:1], [1], ones, ones, ones, False, zeros, 1, [True] * 3),
        ),
    ]
    found += [
        (convolution, (y, part, None, ones, zeros, ones, False, zeros, groups))
        for y, part, groups in convolutions
    ]
    if DEVICE == "cpu":  # GPUs return a view
        found += [(aten.channel_shuffle.default, (x[:, 1:3], 2))]
    return found


def described(run: Callable[..., Any], func: object, args: object) -> object:
    """Return all that can be asked of the results for fake tensors, or the error."""
    mode = FakeTensorMode()
    operands = tree_map_only(Tensor, mode.from_tensor, args)
    with mode:
        try:
            made = run(func, operands, {})
        except (RuntimeError, ValueError) as error:
            return type(error), str(error)
    leaves = made if isinstance(made, list | tuple) else [made]
    return type(made), [
        (type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in leaves
    ]


def test_results_are_those_of_fake_tensors_in_all_that_can_be_asked() -> None:
    for func, args in operations():
        expected = described(lambda func, args, kwargs: func(*args, **kwargs), func, args)
        assert described(ShapeMemo().run, func, args) == expected, func


def test_changes_in_place_return_the_operand_and_run_once_if_strides_stay() -> None:
    mode, memo, add = FakeTensorMode(), ShapeMemo(), _Counted(aten.add_.Tensor)
    for x in fakes(mode, 4, 6, number=3):
        with mode:
            assert memo.run(add, (x, 1), {}) is x
    assert add.runs == 1
    for x in fakes(mode, 4, 6, number=2):
        with mode:
            memo.run(aten.t_.default, (x,), {})
        assert x.shape == (6, 4)
    x, y = *fakes(mode, 4, 6), *fakes(mode, 4, 5)
    for _ in range(2):
        with mode, pytest.raises(RuntimeError, match="broadcast"):
            memo.run(aten.add_.Tensor, (x, y), {})


@cpu_only("batch norms on GPUs have kernels of their own")
@pytest.mark.slow
def test_results_in_tensors_that_exist_run_once_unless_their_size_changes() -> None:
    mode, memo, norm = FakeTensorMode(), ShapeMemo(), _Counted(aten.native_batch_norm.out)
    for x, out in zip(fakes(mode, 2, 4, 6, number=6), fakes(mode, 2, 4, 6, number=6), strict=True):
        statistics = fakes(mode, 4, number=4)
        nothing = fakes(mode, 0, number=2)
        outputs = dict(zip(("out", "save_mean", "save_invstd"), (out, *nothing), strict=True))
        with mode:
            results = memo.run(norm, (x, *statistics, False, 0.0, 1e-5), outputs)
        assert all(result is y for result, y in zip(results, outputs.values(), strict=True))
    assert norm.runs == 1
    add = _Counted(aten.add.out)
    for x, empty in zip(fakes(mode, 4, 6, number=2), fakes(mode, 0, number=2), strict=True):
        with mode:
            memo.run(add, (x, 1), {"out": empty})
        assert empty.shape == (4, 6)
    assert add.runs == 2


VIEWS = [
    (aten.view.default, ([12, 2],)),
    (aten.t.default, ()),
    (aten.slice.Tensor, (1, 2, 5)),
    (aten._unsafe_view.default, ([24],)),
    (aten.unbind.int, (1,)),
]


def test_views_of_fakes_run_once_and_lie_where_torch_puts_them() -> None:
    for func, args in VIEWS:
        mode, memo, view = FakeTensorMode(), ShapeMemo(), _Counted(func)
        for x in fakes(mode, 4, 6, number=3):
            with mode:
                made, expected = memo.run(view, (x, *args), {}), func(x, *args)
            assert isinstance(made, list) == isinstance(expected, list), func
            both = (made, expected) if isinstance(made, list) else ([made], [expected])
            for mine, its in zip(*both, strict=True):
                assert mine.untyped_storage()._cdata == x.untyped_storage()._cdata, func
                places = [(y.shape, y.stride(), y.storage_offset(), y.device) for y in (mine, its)]
                assert places[0] == places[1], func
        assert view.runs == 1, func


@pytest.mark.slow
def test_a_view_of_another_part_is_another_one() -> None:
    mode, memo = FakeTensorMode(), ShapeMemo()
    (x,) = fakes(mode, 4, 6)
    with mode:
        parts = [aten.slice.Tensor(x, 0, first, first + 2) for first in (0, 2)]
        made = [memo.run(aten.slice.Tensor, (part, 0, 1, 2), {}) for part in parts]
    assert [row.storage_offset() for row in made] == [6, 18]


@pytest.mark.slow
def test_another_run_gets_tensors_of_its_own_mode() -> None:
    memo, counted = ShapeMemo(), _Counted(aten.relu.default)
    for _ in range(2):
        mode = FakeTensorMode()
        memo.mode = mode
        x = mode.from_tensor(torch.zeros(3, 4))
        result = memo.run(counted, (x,), {})
        assert (result.fake_mode, result.shape) == (mode, x.shape)
        assert (result + x).fake_mode is mode  # modes can't be mixed
    assert counted.runs == 1


@pytest.mark.slow
def test_values_are_computed_while_new_tensors_are_not_fake() -> None:
    mode, memo = FakeTensorMode(), ShapeMemo()
    memo.mode = mode
    with mode:
        assert isinstance(memo.run(aten.ones.default, ([2],), {}), FakeTensor)
        with unset_fake_temporarily():
            assert memo.run(aten.ones.default, ([2],), {}).tolist() == [1, 1]
