"""Models of other packages are exact as they are, and none of their operators runs whole."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.tier_cases import every
from tests.zoo.comparison import Comparison, compare
from tests.zoo.families import Family, all_families

# Of each family, among others, whether rules replace its layers on three ranks.
MEASURED = Path(__file__).with_name("measured.json")
# In the fast tier: a second each, models of both conversions among them.
FAST = (
    "vit", "swin", "crossformer", "pangu", "fourcastnet", "graphcast", "fno", "attentive_unet",
    "noise_level_unet", "dataclass_output", "own_layers", "plain", "frozen_settings",
    "tall_windows", "timm_vit", "smp_pspnet",
)  # fmt: skip

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/write_model_zoo.py"))
FAMILIES = all_families()


def _check(family: Family, result: Comparison) -> None:
    name, error = result.worst
    assert error <= family.tolerance, f"{name}: {error}"
    expected = json.loads(MEASURED.read_text())[family.name]["conversion"]
    # On two ranks, a level may have rows enough for its layers.
    assert result.conversion in ("layers", expected)
    assert result.whole_calls == {}


@pytest.mark.filterwarnings("default")  # what other packages warn of is theirs
@pytest.mark.parametrize("name", FAST)
def test_common_models_are_exact_on_three_ranks(name: str) -> None:
    _check(FAMILIES[name], compare(FAMILIES[name], 3, trains=True))


# In the long tier: all that are written here, each for one mechanism, and a quarter of the others.
OWN = [name for name, family in FAMILIES.items() if family.package == "own" and name not in FAST]
OTHERS = [name for name, family in FAMILIES.items() if family.package != "own" and name not in FAST]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OWN + every(4, OTHERS, pytest.mark.exhaustive))
def test_all_models_are_exact_on_three_ranks(name: str) -> None:
    _check(FAMILIES[name], compare(FAMILIES[name], 3, trains=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", every(3, list(FAMILIES)[::4], pytest.mark.exhaustive))
def test_models_are_exact_on_two_ranks_in_evaluation(name: str) -> None:
    _check(FAMILIES[name], compare(FAMILIES[name], 2, trains=False))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("smp Unet, ResNet18", 0.30),
        # Its 3 heads can't be shared by 4 ranks: each holds the keys and values of all rows.
        ("timm ViT tiny", 0.41),
        pytest.param("timm ConvNeXt atto", 0.30, marks=pytest.mark.exhaustive),
        pytest.param("timm Swin tiny", 0.30, marks=pytest.mark.exhaustive),
        pytest.param("diffusers UNet2D, convolutions", 0.30, marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_of_four_saves_its_part_of_the_activations(name: str, most: float) -> None:
    from zoo import GRIDS, HOT, measure

    one, four = (
        measure(lambda: HOT[name](GRIDS[1]), (1, 3, *GRIDS[1]), ranks).saved for ranks in (1, 4)
    )
    assert four <= most * one


def test_all_families_are_measured() -> None:
    assert sorted(json.loads(MEASURED.read_text())) == sorted(FAMILIES)


def test_pages_have_the_table_and_the_count() -> None:
    for path in SCRIPT["PAGES"]:
        page = path.read_text()
        assert SCRIPT["written"](page) == page, f"{path.name}: run scripts/write_model_zoo.py"
    others = sum(family.package != "own" for family in FAMILIES.values())
    assert f"<!-- zoo: count -->{others} models of timm" in (ROOT / "README.md").read_text()


def test_the_zoo_is_large() -> None:
    assert len(FAMILIES) >= 150
