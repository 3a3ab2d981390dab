"""The presets for the quickstart data are exact under sharding at any height."""

from __future__ import annotations

import pytest

from credit_dp.command.compose import Composer
from credit_dp.fields import Fields
from credit_dp.models import build_model
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import on_threads

# Three variables on three levels and one at the surface, a forcing and a static field.
FIELDS = Fields(((0, 1, 2), (4, 5, 6), (7, 8, 9)), (3,), others=2)
COLUMNS = 16


def _built(preset, rows):
    config = Composer("train").config([f"model={preset}"]).model
    return lambda: build_model(config, FIELDS, (rows, COLUMNS))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [32, 33, 61, 121])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("preset", ["unet", "pangu", "crossformer"])
def test_sharded_equals_whole(preset, ranks, rows):
    shape = (1, FIELDS.inputs, rows, COLUMNS)
    on_threads(ranks, assert_same_as_whole_globe, _built(preset, rows), (), shape, MODEL)
