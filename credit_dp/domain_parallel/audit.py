"""The audit of code between the layers: does any operation mix rows?

The traces of the whole globe and of a band are compared operation by operation. Where the rows of
each tensor lie is followed from the inputs on; an operation that would mix them, or of which that
is not known, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from credit_dp.domain_parallel.operations import (
    FACTORIES,
    RANDOM,
    RESIZES,
    SIZED,
    SIZES,
    Layout,
    MixedError,
    Rows,
    layout_after,
    layout_of_new,
)
from credit_dp.domain_parallel.trace import Ref, Step, Trace
from credit_dp.errors import UserError

# Part of an operation's name -> the exact one of `functional`.
INSTEAD = {
    "aten.mean": "mean",
    "aten.sum": "mean",
    "upsample": "interpolate",
    "adaptive_avg_pool": "interpolate",
    "_pad": "pad",
    "aten.roll": "roll",
}

OTHER_WAY = "control flow depends on the number of rows or on the type of a sharded layer"

# What these need instead of a size taken from a tensor, which is a band's.
SETTINGS = {
    "interpolate": "(x, scale_factor=...), or with size=(rows, columns) of the whole globe as "
    "constants, or nn.Upsample"
}


def audit(whole: Trace, band: Trace, heights: dict[int, int]) -> None:
    """Refuse code that mixes rows.

    Args:
        whole: the trace of the whole globe.
        band: the trace of one band.
        heights: global number of rows -> the band's.

    Raises:
        AuditError: an operation mixes rows or is unknown, with the line of code.
    """
    refusals = list(_refusals(whole, band, heights))
    if refusals:
        raise AuditError(refusals)


class AuditError(UserError):
    """Code mixes rows. The message tells of the first place, `refusals` of all that were found."""

    def __init__(self, refusals: list[str]) -> None:
        super().__init__(refusals[0])
        self.refusals = refusals


def _refusals(whole: Trace, band: Trace, heights: dict[int, int]) -> Iterator[str]:
    """Tell of each operation that is refused, as long as it is clear where rows are after it."""
    layouts: dict[int, Layout] = {}
    last = ""
    for step, other in zip(whole.steps, band.steps, strict=False):
        last = step.where or last
        if step.op is not other.op:
            yield refusal(last, OTHER_WAY)
            return
        try:
            _judge(step, other, heights, layouts)
        except MixedError as error:
            yield refusal(step.where, str(error), _label(step))
            if len(step.made) != len(other.made):
                return
            try:
                for ref, made in zip(step.made, other.made, strict=True):
                    layouts[ref.number] = _seen(ref, made, heights)
            except MixedError:
                return
    if len(whole.steps) != len(band.steps):
        yield refusal(last, OTHER_WAY)


def refusal(where: str, reason: str, operation: str = "") -> str:
    """Say where code mixes rows, what it does, and what to do instead."""
    instead = next((name for part, name in INSTEAD.items() if part in operation), None)
    call = f"credit_dp.domain_parallel.functional.{instead}{SETTINGS.get(instead or '', '')}"
    fix = f"Use {call}, or put" if instead else "Put"
    colon = ": " if operation else ""
    return (
        f"{where}: {operation}{colon}{reason}. {fix} this into a module of its own and name it in "
        "custom_converters={TYPE: function(module) -> replacement}."
    )


def _label(step: Step) -> str:
    place = step.given.get("place", "output")
    return step.name or (place if isinstance(place, str) else "a module from custom_converters")


def _judge(step: Step, other: Step, heights: dict[int, int], layouts: dict[int, Layout]) -> None:
    given = [layouts.get(ref.number) for ref in step.refs]
    if [(r.number, r.value) for r in step.refs] != [(r.number, r.value) for r in other.refs]:
        raise MixedError("what it works on depends on the number of rows")
    if len(step.made) != len(other.made):
        raise MixedError("what it makes depends on the number of rows")
    if step.op is None:
        _judge_layer(step, other, heights, layouts, given)
        return
    if _numbers(step) != _numbers(other):
        raise MixedError("a number depends on the number of rows")
    if step.name in FACTORIES or (step.name in SIZED and not any(given)):
        seen = [_seen(ref, band, heights) for ref, band in zip(step.made, other.made, strict=True)]
        made = [layout and (layout_of_new(step, given) or layout) for layout in seen]
    else:
        layout = layout_after(step, given) if any(given) else None
        # Beside its result an operation may make what has no rows: the state of random numbers.
        made = [
            None if 0 in ref.shape or (at > 0 and ref.shape == band.shape) else layout
            for at, (ref, band) in enumerate(zip(step.made, other.made, strict=True))
        ]
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
        raise MixedError(OTHER_WAY)
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
    sized = step.name in SIZED | FACTORIES | RESIZES
    return {key: value for key, value in settings.items() if not (sized and key in SIZES)}


def _seen(ref: Ref, band: Ref, heights: dict[int, int]) -> Layout:
    """Where the two runs' shapes differ, one dimension at most, there are the rows."""
    if len(ref.shape) != len(band.shape):
        raise MixedError(f"makes {ref.shape} of the globe and {band.shape} of a band")
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
