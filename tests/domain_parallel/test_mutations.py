"""The exactness tests notice errors: each of these mutants makes them fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from credit_dp.domain_parallel import exchange, halo_exchange
from credit_dp.domain_parallel.layers import base, conv, conv_bands, group_norm, norm, row_groups
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.domain_parallel.models import RowGroupModel
from tests.ranks import RankError, cpu_only, on_threads

EDGES_OF = conv_bands.edges_of  # before it is replaced


def _build():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 3, 2, 1)
    )


def _no_returned_gradients(total, rows, message, dim):
    """Leave out the gradients that other ranks return."""


def _band_edges_are_poles(start, stop, height, mode):
    ranges = exchange.rows_with_poles(start, stop, height, mode)
    return (exchange.RowRange(0, 1, zero_filled=True), *ranges[1:]) if start > 0 else ranges


def _moments_of_the_band(x, groups, rows, transport):
    return group_norm._local_moments(x, groups).unbind()


def _moments_of_the_first_band(parts, sizes):
    return parts[0].unbind()


def _phase_of_the_band(self, out, height):
    reach, stride = self._kernel_extent, self.conv.stride[0]
    first = out.start * stride
    return first, first + (out.stop - out.start - 1) * stride + reach


def _poles_are_neighbours(start, stop, height, mode):
    return exchange.rows_with_poles(start, stop, height, "circular")


def _one_row_off(self, out, height):
    first, stop = _INPUT_SPAN(self, out, height)
    return first + 1, stop + 1


def _halo_on_the_wrong_side(kernel, rows, taps):
    north, south = EDGES_OF(kernel, rows, taps)
    return replace(north, halo=south.halo), replace(south, halo=north.halo)


def _no_halo_in_the_weight_gradient(self, total, of_taps):
    """Leave out the rows of the halo."""


_INPUT_SPAN = conv._RowConv.input_span


MUTANTS = [
    (halo_exchange, "_unpack_add", _no_returned_gradients, "input gradient"),
    (base, "rows_with_poles", _band_edges_are_poles, "output|sizes|size"),
    (conv._RowConv, "input_span", _phase_of_the_band, "output|size"),
    (conv._RowConv, "input_span", _one_row_off, "output"),
    (base, "rows_with_poles", _poles_are_neighbours, "output"),
]


@pytest.mark.parametrize(
    ("where", "name", "mutant", "match"),
    [
        *MUTANTS,
        (group_norm, "_global_moments", _moments_of_the_band, "output"),
        (conv_bands, "edges_of", _halo_on_the_wrong_side, "output"),
        (conv_bands.BandEdge, "add_weight_grad", _no_halo_in_the_weight_gradient, "weight"),
    ],
)
def test_a_broken_core_is_noticed(monkeypatch, where, name, mutant, match):
    _assert_noticed(monkeypatch, where, name, mutant, match)


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize(
    ("where", "name", "mutant", "match"),
    [
        *MUTANTS,
        pytest.param(
            *(norm, "combine_moments", _moments_of_the_first_band, "output"),
            marks=cpu_only("norms on GPUs combine their moments elsewhere"),
        ),
    ],
)
def test_a_broken_core_is_noticed_in_small_bands(monkeypatch, where, name, mutant, match):
    _assert_noticed(monkeypatch, where, name, mutant, match)


def _assert_noticed(monkeypatch, where, name, mutant, match):
    case = (3, assert_same_as_whole_globe, _build, (), (1, 2, 13, 5))
    on_threads(*case)
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(RankError, match=match):
        on_threads(*case)


def _rows_of_the_band(self, bands):
    """Attend within the band, as if each rank began a new window."""
    assignment = _ASSIGNMENT(self, bands)
    band = bands.rows(self.manager.domain_rank)
    rows = tuple(row for row in range(band.start, band.stop))
    ranges = tuple(
        (exchange.RowRange(*b),) for b in zip(bands.bounds, bands.bounds[1:], strict=False)
    )
    identity = exchange.RowExchange(bands, ranges, self.manager.domain_rank)
    return assignment._replace(order=rows, fetch_exchange=identity, return_exchange=identity)


def _bias_of_the_first_groups(self, bands):
    assignment = _ASSIGNMENT(self, bands)
    return assignment._replace(groups=slice(0, assignment.groups.stop - assignment.groups.start))


def _rows_are_not_returned(self, bands):
    assignment = _ASSIGNMENT(self, bands)
    order = assignment.return_exchange.partition
    required_rows = tuple(
        (exchange.RowRange(*b),) for b in zip(order.bounds, order.bounds[1:], strict=False)
    )
    return assignment._replace(
        return_exchange=replace(assignment.return_exchange, required_rows=required_rows)
    )


_ASSIGNMENT = row_groups.DomainParallelRowGroups.assignment


@pytest.mark.parametrize("kind", ["windows", "dilated"])
@pytest.mark.parametrize(
    ("mutant", "match"),
    [
        (_rows_of_the_band, "output"),
        (_bias_of_the_first_groups, "output"),
        (_rows_are_not_returned, "output|size"),
    ],
)
def test_wrongly_assigned_groups_are_noticed(monkeypatch, kind, mutant, match):
    case = (3, assert_same_as_whole_globe, RowGroupModel, (kind, 2, 1, 18), (1, 2, 18, 3))
    on_threads(*case)
    monkeypatch.setattr(row_groups.DomainParallelRowGroups, "assignment", mutant)
    with pytest.raises(RankError, match=match):
        on_threads(*case)
