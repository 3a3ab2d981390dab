"""The tables of keys in the docs agree with the dataclasses of the config."""

import importlib.util
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from tests.tables import entry

ROOT = Path(__file__).parents[2]
PAGES = (
    "training",
    "loss",
    "optimizer",
    "checkpoints",
    "failures",
    "data-tables",
    "quickstart-climate",
    "keys",
)


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "write_key_tables", ROOT / "scripts/write_key_tables.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_tables_agree_with_the_fields(tables: ModuleType) -> None:
    pages = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    assert {page for page, text in pages.items() if tables.TABLE.search(text)} == set(PAGES)
    for page, text in pages.items():
        written = tables.write_tables(text, examples=page == "keys")
        assert written == text, f"{page}: run python scripts/write_key_tables.py"
        markers = [marker for _, marker, _ in tables.TABLE.findall(text)]
        assert len(markers) == len(set(markers)), f"{page}: a table is repeated"


def test_each_group_of_training_is_in_a_table() -> None:
    text = "\n".join((ROOT / f"docs/{page}.md").read_text() for page in PAGES)
    assert "| `optimizer.lr` | `0.003` | `1e-3` | learning rate after the warm-up |" in text
    for key in ("loss.spectrum", "trainer.exploding", "logger.wandb", "parallel.domain"):
        assert f"\n| `{key}` | " in text


def keys_of(group: Any, name: str = "") -> Iterator[str]:
    for item in fields(group):
        value = getattr(group, item.name)
        if is_dataclass(value):
            yield from keys_of(value, f"{name}{item.name}.")
        else:
            yield name + item.name


CHOICES = [
    *(f"model={name}" for name in ("unet", "pangu", "crossformer", "swin", "sfno", "diffusion")),
    *(f"optimizer={name}" for name in ("lion", "muon")),
]


@pytest.mark.slow
def test_the_page_of_all_keys_has_those_of_each_choice() -> None:
    page = (ROOT / "docs/keys.md").read_text()
    compose = Composer("train").compose_config
    keys = {key for choice in CHOICES for key in keys_of(compose([choice]))}
    assert {key for key in keys if f"| `{key}` |" not in page} == set()


def test_a_row_has_key_default_and_meaning(tables: ModuleType) -> None:
    row = tables.row("trainer.keep_checkpoints")
    assert row == (
        "| `trainer.keep_checkpoints` | `1` | number of the newest checkpoints that are kept |"
    )
    assert tables.row("model=unet.blocks").startswith("| `model.blocks` | `1` | ")
    # The quickstart's value, which the plain command has; alone where the field has none.
    assert "| `8`; quickstart: `4` | " in tables.row("data.batch_size")
    assert tables.row("model.name").startswith("| `model.name` | `unet` | ")
    row = tables.row("data.quickstart.truncation", example=True)  # that of the comment, moved
    assert row.startswith("| `data.quickstart.truncation` | `21` | `42` | spectral truncation: ")
    assert "e.g." not in row


@pytest.mark.slow
def test_the_command_line_takes_each_example(tables: ModuleType) -> None:
    page = (ROOT / "docs/keys.md").read_text()
    count = 0
    for _, marker, _ in tables.TABLE.findall(page):
        for key in (key for selector in marker.split() for key in tables.select_keys(selector)):
            group, _, name = key.rpartition(".")
            written, field, comment = tables.field_of(key)
            example = tables.example_of(written, field, comment)
            (override,) = parse_overrides([example if "=" in example else f"{written}={example}"])
            count += 1
            if "=" in example:
                continue  # a choice of the group
            config = next(cls for cls in tables.classes_of(group) if field in fields(cls))
            with entry(f"{written}={example}"):
                taken = OmegaConf.merge(OmegaConf.structured(config), {name: override.value()})
                assert taken[name] != tables.default_value(field)
    assert count > 150


def test_an_unknown_key_is_refused(tables: ModuleType) -> None:
    for key in ("trainer.stpes", "stpes", "nothing.*"):
        with pytest.raises(ValueError, match="no such"):
            tables.write_tables(f"<!-- keys: {key} -->\n<!-- /keys -->\n")
