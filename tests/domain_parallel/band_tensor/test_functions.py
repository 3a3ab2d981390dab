"""The functions of the view's tables on tensors of the globe: outputs and gradients."""

from __future__ import annotations

import pytest

from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.function_tables import FAMILIES, MIXTURES, RUN_WHOLE, SLICES

# Of torch on GPUs, where recurrent layers get copies of their weights.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")


def test_some_of_each_kind() -> None:
    few = {name: MIXTURES[name] for name in ("group norm", "einsum", "losses", "gru")}
    functions.check_table(few, 3, whole=None)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_equal_those_of_the_globe(family: str) -> None:
    functions.check_table(FAMILIES[family], 3, whole=None)


@pytest.mark.slow
def test_slices_of_few_rows_and_what_has_no_rule() -> None:
    functions.check_table(SLICES, 4, whole=None)
    functions.check_table(RUN_WHOLE, 2, whole=None)
