"""Writes the tables of config keys in the docs, from the dataclasses of the config.

A table stands between `<!-- keys: KEY KEY ... -->` and `<!-- /keys -->`. A KEY is a dotted key
such as `trainer.steps`, all keys of a group (`loss.*`), or those that one model adds
(`model=unet`). Default and meaning are the field's and its comment, as `train.py --help` shows.

    python scripts/write_key_tables.py
"""

import re
import sys
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import omegaconf

from credit_dp.cli.overrides import as_yaml, key_comments, type_of_key
from credit_dp.config import (
    AdamWConfig,
    Config,
    LionConfig,
    MuonConfig,
    SoapConfig,
    StandardLossConfig,
)
from credit_dp.config.model import MODELS, BlocksConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = re.compile(r"(<!-- keys: ([^>\n]+) -->\n).*?(<!-- /keys -->\n)", re.DOTALL)
HEADING = ["| key | default | meaning |", "|---|---|---|"]
# The classes of the groups whose keys depend on the choice; those of the first are `GROUP.*`.
CLASSES: dict[str, tuple[type, ...]] = {
    "model": (BlocksConfig, *MODELS.values()),
    "loss": (StandardLossConfig,),
    "optimizer": (AdamWConfig,),
}
# Of choices whose class is not that of the group, `GROUP=NAME.KEY` selects a key.
OTHER_CHOICES: dict[str, type] = {
    "optimizer=lion": LionConfig,
    "optimizer=muon": MuonConfig,
    "optimizer=soap": SoapConfig,
}


def main() -> int:
    """Write all tables; with --check write nothing, and return 1 if a table is out of date."""
    check = "--check" in sys.argv
    outdated = []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        written = write_tables(text)
        if written != text:
            outdated.append(path.name)
            if not check:
                path.write_text(written)
    if check and outdated:
        sys.stderr.write(f"{', '.join(outdated)}: run python scripts/write_key_tables.py\n")
        return 1
    return 0


def write_tables(text: str) -> str:
    """Return a page with new tables."""

    def table(match: re.Match[str]) -> str:
        rows = [row(key) for selector in match[2].split() for key in select_keys(selector)]
        return match[1] + "\n".join(["", *HEADING, *rows, "", ""]) + match[3]

    return TABLE.sub(table, text)


def select_keys(selector: str) -> list[str]:
    """Return the dotted keys of a selector in a marker."""
    if selector.startswith("model="):
        config = MODELS[selector.removeprefix("model=")]
        # What its class declares: not what it shares with others, or with the model it extends.
        own = config.__annotations__.keys() - {"name"}
        return [f"{selector}.{item.name}" for item in fields(config) if item.name in own]
    if selector.endswith(".*"):
        group = selector.removesuffix(".*")
        keys = fields(classes_of(group)[0])
        # A group within has its own keys and no comment.
        return [f"{group}.{item.name}" for item in keys if not is_dataclass(item.default_factory)]
    return [selector]


def classes_of(group: str) -> tuple[type, ...]:
    """Return the dataclasses whose fields are the keys of a group.

    Raises:
        ValueError: there is no such group.
    """
    if group.startswith("model="):
        return (MODELS[group.removeprefix("model=")],)
    if group in OTHER_CHOICES:
        return (OTHER_CHOICES[group],)
    schema = CLASSES.get(group, type_of_key(group) if group else Config)
    classes = schema if isinstance(schema, tuple) else (schema,)
    if not all(is_dataclass(cls) for cls in classes):
        raise ValueError(f"{group}: no such group of keys")
    return classes


def row(key: str) -> str:
    """Return the row of a key.

    Raises:
        ValueError: there is no such key, or its field has no comment.
    """
    group, _, name = key.rpartition(".")
    for cls in classes_of(group):
        comment = key_comments(cls).get(name)
        field = next((item for item in fields(cls) if item.name == name), None)
        if field is not None and comment:
            shown = f"{group.partition('=')[0]}.{name}" if group else name
            meaning = comment.replace("|", r"\|")
            return f"| `{shown}` | {default_of(field)} | {meaning} |"
    raise ValueError(f"{key}: there is no such key, or its field has no comment")


def default_of(item: "Field[Any]") -> str:
    """Return the default of a field as YAML, formatted as code; empty if it has none."""
    value = item.default_factory() if item.default_factory is not NO_DEFAULT else item.default
    if value in (NO_DEFAULT, omegaconf.MISSING):
        return ""
    return f"`{as_yaml(list(value) if isinstance(value, tuple) else value)}`"


if __name__ == "__main__":
    sys.exit(main())
