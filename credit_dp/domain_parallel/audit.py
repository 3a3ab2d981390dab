"""The audit of code between the layers: does any operation mix rows?

The traces of the whole globe and of a band are compared operation by operation. Where the rows of
each tensor lie is followed from the inputs on; an operation that would mix them, or of which that
is not known, is refused.
"""

from __future__ import annotations

from credit_dp.domain_parallel.operations import (
    FACTORIES,
    RANDOM,
    SIZED,
    SIZES,
    Layout,
    MixedError,
    Rows,
    layout_after,
)
from credit_dp.domain_parallel.trace import Ref, Step, Trace
from credit_dp.errors import UserError


def audit(whole: Trace, band: Trace, heights: dict[int, int]) -> None:
    """Refuse code that mixes rows.

    Args:
        whole: the trace of the whole globe.
        band: the trace of one band.
        heights: global number of rows -> the band's.

    Raises:
        UserError: an operation mixes rows or is unknown, with the line of code.
    """
    layouts: dict[int, Layout] = {}
    last = ""
    for step, other in zip(whole.steps, band.steps, strict=False):
        last = step.where or last
        if step.op is not other.op:
            raise _refusal(last, "control flow depends on the number of rows")
        try:
            _judge(step, other, heights, layouts)
        except MixedError as error:
            raise _refusal(step.where, f"{step.name or 'layer'}: {error}") from None
    if len(whole.steps) != len(band.steps):
        raise _refusal(last, "control flow depends on the number of rows")


def _refusal(where: str, reason: str) -> UserError:
    return UserError(
        f"{where}: {reason}. Put this into a module of its own and name it in custom_converters."
    )


def _judge(step: Step, other: Step, heights: dict[int, int], layouts: dict[int, Layout]) -> None:
    given = [layouts.get(ref.number) for ref in step.refs]
    if [(r.number, r.value) for r in step.refs] != [(r.number, r.value) for r in other.refs]:
        raise MixedError("what it works on depends on the number of rows")
    if step.op is None:
        _judge_layer(step, other, heights, layouts, given)
        return
    if _numbers(step) != _numbers(other):
        raise MixedError("a number depends on the number of rows")
    if step.name in FACTORIES or (step.name in SIZED and not any(given)):
        made = [_seen(ref, band, heights) for ref, band in zip(step.made, other.made, strict=True)]
    else:
        layout = layout_after(step, given) if any(given) else None
        made = [layout] * len(step.made)
    if step.name in RANDOM and not any(made):
        raise MixedError("draws numbers that would differ between the ranks of a globe")
    for ref, band, layout in zip(step.made, other.made, made, strict=True):
        _check_shapes(ref, band, layout, heights)
        layouts[ref.number] = layout


def _judge_layer(
    step: Step,
    other: Step,
    heights: dict[int, int],
    layouts: dict[int, Layout],
    given: list[Layout],
) -> None:
    """A layer gets rows where it was planned to; others have them in the last dimension but one."""
    if step.settings != other.settings:
        raise MixedError("control flow depends on the number of rows")
    takes = step.given.get("takes")
    for at, (ref, layout) in enumerate(zip(step.refs, given, strict=True)):
        if takes is not None and (layout and layout.place) != (takes[at] and takes[at].place):
            raise MixedError("gets rows in another place than it seemed")
        if takes is None and layout and layout.place[:2] != (len(ref.shape) - 2, 1):
            raise MixedError("rows have left the last dimension but one")
    makes = step.given.get("makes") or [None] * len(step.made)
    for ref, band, layout in zip(step.made, other.made, makes, strict=True):
        if takes is None:
            layout = _seen(ref, band, heights)
        _check_shapes(ref, band, layout, heights)
        layouts[ref.number] = layout


def _numbers(step: Step) -> dict[str, object]:
    """What is given beside tensors, without sizes that are compared as shapes."""
    settings = step.settings
    if step.name == "aten.slice":
        whole = step.refs[0].shape == step.made[0].shape and settings.get("step", 1) == 1
        return {} if whole else settings
    sized = step.name in SIZED or step.name in FACTORIES
    return {key: value for key, value in settings.items() if not (sized and key in SIZES)}


def _seen(ref: Ref, band: Ref, heights: dict[int, int]) -> Layout:
    """Where the two runs' shapes differ, one dimension at most, there are the rows."""
    differing = [d for d, (a, b) in enumerate(zip(ref.shape, band.shape, strict=True)) if a != b]
    if not differing:
        return None
    dim = differing[0]
    size, local = ref.shape[dim], band.shape[dim]
    for height in sorted(heights, reverse=True):
        if len(differing) == 1 and size * heights[height] == local * height and size % height == 0:
            return Rows(dim, 1, size // height, height)
    raise MixedError(f"makes {ref.shape} of the globe and {band.shape} of a band")


def _check_shapes(ref: Ref, band: Ref, layout: Layout, heights: dict[int, int]) -> None:
    """The layout predicted must be the one that the shapes show."""
    expected = list(ref.shape)
    if layout is not None:
        expected[layout.dim] = layout.outer * heights[layout.height] * layout.inner
        if ref.shape[layout.dim] != layout.outer * layout.height * layout.inner:
            raise MixedError("changes the number of rows")
    if tuple(expected) != band.shape:
        raise MixedError(f"makes {ref.shape} of the globe and {band.shape} of a band")
