"""Finding layers that read one tensor, so that one exchange can serve them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import nn

from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.shared_exchange import SharedExchange, share, unshare
from credit_dp.domain_parallel.trace import Trace

# The names of layers that were called with one tensor, once per call.
Reading = tuple[str, ...]


def readings(trace: Trace) -> frozenset[Reading]:
    """Return what was called with each tensor in the run of the whole globe."""
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for step in trace.steps:
        place = step.given.get("place")
        if step.op is None and isinstance(place, str) and step.given["taken"]:
            by_tensor[step.given["taken"][0].number].append(place)
    return frozenset(tuple(sorted(names)) for names in by_tensor.values())


def share_exchanges(model: nn.Module, runs: Iterable[frozenset[Reading]]) -> None:
    """Let layers that always read the same tensors together fetch together.

    `runs` are the readings of each planned run: a model may do other things while training.
    """
    unshare(model)
    modules = dict(model.named_modules())
    layers = {name: m for name, m in modules.items() if isinstance(m, WindowLayer) and _fetches(m)}
    found = [_alike(readings, layers) for readings in runs]
    for names in frozenset.intersection(*found):
        uses = Counter(names)
        readers = tuple(layers[name] for name in uses)
        share(_around(list(uses), modules), SharedExchange(readers, tuple(uses.values())))


def _alike(readings: frozenset[Reading], layers: dict[str, WindowLayer]) -> frozenset[Reading]:
    """Return readings by several layers that could fetch together and never read otherwise."""
    groups: set[Reading] = set()
    for names in readings:
        by_setting: dict[object, list[str]] = defaultdict(list)
        for name in names:
            if name in layers:
                by_setting[_setting(layers[name])].append(name)
        groups.update(map(tuple, by_setting.values()))
    membership = Counter(name for group in groups for name in set(group))
    return frozenset(
        group
        for group in groups
        if len(set(group)) > 1
        and all(membership[name] == 1 for name in group)
        and _overlap([layers[name] for name in set(group)])
    )


def _setting(layer: WindowLayer) -> object:
    return layer.pole_mode, layer.dim, tuple(sorted(layer.planned))


def _fetches(layer: WindowLayer) -> bool:
    """Return whether a layer gets its rows as window layers do, and gets any from others."""
    plain = type(layer).needs is WindowLayer.needs and type(layer).fetch is WindowLayer.fetch
    plain = plain and all(map(layer.fetches, layer.planned))
    bands = (layer.planned_bands(height) for height in layer.planned)
    return plain and any(not layer.exchange(its).moves_nothing for its in bands)


def _overlap(layers: list[WindowLayer]) -> bool:
    """Return whether every rank's windows leave no gap, whose rows would be sent for nothing."""
    for height in layers[0].planned:
        bands = [layer.planned_bands(height) for layer in layers]
        for rank in range(bands[0].taken.ranks):
            spans = sorted(
                layer.span(its.made.rows(rank), height)
                for layer, its in zip(layers, bands, strict=True)
            )
            reached = spans[0][1]
            for first, stop in spans[1:]:
                if first > reached:
                    return False
                reached = max(reached, stop)
    return True


def _around(names: list[str], modules: dict[str, nn.Module]) -> nn.Module:
    """Return the innermost module around all of these that is called itself."""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    while shared and type(modules[".".join(shared)]).forward is nn.Module.forward:
        shared.pop()
    return modules[".".join(shared)]
