"""The page of other packages' models agrees with the tables of their tests."""

import json
import runpy
from pathlib import Path

from tests.zoo.families import all_families

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/write_model_zoo.py"))


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs/model-zoo.md").read_text()
    assert SCRIPT["written"](page) == page, "run scripts/write_model_zoo.py"


def test_measured_families_exist() -> None:
    assert set(json.loads(SCRIPT["MEMORY"].read_text())) <= set(all_families())
