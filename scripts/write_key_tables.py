"""Writes the tables of config keys in the docs, from the dataclasses of the config.

A table stands between `<!-- keys: KEY KEY ... -->` and `<!-- /keys -->`. A KEY is a dotted key
such as `trainer.steps`, all keys of a group (`loss.*`), or those that one model adds
(`model=unet`). Default and meaning are the field's and its comment, and where a choice of
`train.py` has another value than the field, as data=quickstart does, that value is added. The page
of all keys also has an example of each.

    python scripts/write_key_tables.py
"""

import re
import sys
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import omegaconf

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import as_yaml, key_comments, type_of_key
from credit_dp.config import (
    AdamWConfig,
    Config,
    LionConfig,
    MuonConfig,
    StandardLossConfig,
)
from credit_dp.config.model import MODELS, BlocksConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = re.compile(r"(<!-- keys: ([^>\n]+) -->\n).*?(<!-- /keys -->\n)", re.DOTALL)
HEADING = ["| key | default | meaning |", "|---|---|---|"]
ALL_KEYS = "keys.md"
HEADING_WITH_EXAMPLE = ["| key | default | e.g. | meaning |", "|---|---|---|---|"]
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
}
# In a comment, and choices in one: `float32 | bfloat16: of ...`.
EXAMPLE = re.compile(r",? e\.g\. (\{.*\}|\[.*?\]|[\w.]+\w)")
CHOICE = re.compile(r"\| (\w+)")
# Where neither the comment nor the default leads to one.
EXAMPLES = {
    "run.name": "first",
    "run.dir": "/scratch/first",
    "data.name": "data=zarr",
    "data.store": "era5.zarr",
    "data.member": "0",
    "data.cache": "/scratch/cache",
    "data.regrid": "bilinear",
    "data.boundary": "3",
    "data.relaxation": "3",
    "data.prognostic": "[geopotential,temperature]",
    "data.diagnostic": "[total_precipitation]",
    "data.forcing": "[solar]",
    "data.static": "[land_sea_mask]",
    "data.optional_static": "[land_sea_mask]",
    "data.levels": "[500,850]",
    "data.hybrid": "{a: [0,2000,0],b: [0,0.5,1]}",
    "data.limits": "{temperature: [150,350]}",
    "data.variables": '{total_precipitation: {normalise: "log1p(1e-3)"}}',
    "data.step": "24h",
    "data.statistics": "statistics.nc",
    "data.dates.train": "[1990-01-01,2017-12-31]",
    "data.dates.valid": "[2018-01-01,2018-12-31]",
    "data.dates.test": "[2020-01-01,2020-12-31]",
    "data.dates.limit": "100",
    "data.dates.preset": "[test]",
    "data.quickstart.start": "2003-02-01",
    "model.name": "model=pangu",
    "model.fixers": "[nonnegative,dry_air]",
    "model.stochastic_depth": "0.1",
    "model.dropout": "0.1",
    "model.kernel": "[15,15]",
    "model.s_churn": "2.5",
    "model.s_tmin": "0.75",
    "model.s_tmax": "40",
    "trainer.matmul": "highest",
    "trainer.checkpoint_activations": "step",
    "trainer.mirror": "0.5",
    "trainer.input_noise": "0.1",
    "trainer.validate_every": "100",
    "trainer.patience": "3",
    "trainer.evaluate_members": "8",
    "trainer.evaluate_hours": "[6,24,72]",
    "trainer.evaluate_stride_hours": "6",
    "loss.name": "loss=mae",
    "loss.spectrum": "0.1",
    "loss.sphere_spectrum": "0.1",
    "loss.gradient": "0.5",
    "loss.scales": "[0,500,1000]",
    "optimizer.name": "optimizer=muon",
    "optimizer.schedule": "constant",
    "optimizer.layer_decay": "0.8",
    "optimizer.betas": "[0.9,0.999]",
    "optimizer.momentum": "0.9",
    "parallel.data": "2",
    "parallel.domain": "4",
    "parallel.threads": "1",
    "parallel.microbatches": "4",
    "parallel.stages": "[encoder.1,decoder.0]",
    "parallel.check_replicas_every": "100",
    "logger.trackers": "[tensorboard]",
    "logger.project": "seasons",
    "logger.mlflow": "http://localhost:5000",
    "trainer.autocast": "bfloat16",
    "seed": "1",
    "data.quickstart.seed": "1",
    "init_from": "outputs/first",
    "resume": "auto",
    "parallel.reduce_dtype": "bfloat16",
    "parallel.param_dtype": "bfloat16",
    "loss.alpha": "0.95",
    "optimizer.decay_factor": "0.1",
    "optimizer.lr": "1e-3",
    "model.upsample": "nearest",
}

# Where the field has none that a reader could use.
DEFAULTS = {
    "data.cache": "`~/.cache/credit_dp`",
    "data.name": "`quickstart`",
    "data.prognostic": "of `data=NAME`",
    "model.name": "`unet`",
}


def main() -> int:
    """Write all tables; with --check write nothing, and return 1 if a table is out of date."""
    check = "--check" in sys.argv
    outdated = []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        written = write_tables(text, examples=path.name == ALL_KEYS)
        if written != text:
            outdated.append(path.name)
            if not check:
                path.write_text(written)
    if check and outdated:
        sys.stderr.write(f"{', '.join(outdated)}: run python scripts/write_key_tables.py\n")
        return 1
    return 0


def write_tables(text: str, *, examples: bool = False) -> str:
    """Return a page with new tables, maybe with examples."""

    def table(match: re.Match[str]) -> str:
        keys = [key for selector in match[2].split() for key in select_keys(selector)]
        heading = HEADING_WITH_EXAMPLE if examples else HEADING
        rows = [row(key, example=examples) for key in keys]
        return match[1] + "\n".join(["", *heading, *rows, "", ""]) + match[3]

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


def row(key: str, *, example: bool = False) -> str:
    """Return the row of a key, maybe with an example instead of that in its comment.

    Raises:
        ValueError: there is no such key, its field has no comment, or no example is known.
    """
    name, field, comment = field_of(key)
    default = DEFAULTS.get(name) or default_of(key, field)
    cells = [f"`{name}`", default, comment.replace("|", r"\|")]
    if example:
        cells[2:] = [f"`{example_of(name, field, comment)}`", EXAMPLE.sub("", cells[2])]
    return f"| {' | '.join(cells)} |"


def field_of(key: str) -> "tuple[str, Field[Any], str]":
    """Return the name of a key on the command line, its field, and the comment of that.

    Raises:
        ValueError: there is no such key, or its field has no comment.
    """
    group, _, name = key.rpartition(".")
    for cls in classes_of(group):
        comment = key_comments(cls).get(name)
        field = next((item for item in fields(cls) if item.name == name), None)
        if field is not None and comment:
            return (f"{group.partition('=')[0]}.{name}" if group else name), field, comment
    raise ValueError(f"{key}: there is no such key, or its field has no comment")


def example_of(name: str, item: "Field[Any]", comment: str) -> str:
    """Return a value of a key other than its default, as it is typed after `=`.

    Raises:
        ValueError: none is known.
    """
    if name in EXAMPLES:
        return EXAMPLES[name]
    if found := EXAMPLE.search(comment):
        return found[1]
    default = default_value(item)
    if isinstance(default, bool):
        return str(not default).lower()
    choices = [choice for choice in CHOICE.findall(comment) if choice != default]
    if choices:
        return choices[-1]
    return str(twice(default, name)).replace(" ", "")


def twice(value: Any, name: str) -> Any:
    """Return twice a number, or a list with twice each of its numbers."""
    if isinstance(value, list | tuple):
        return [twice(item, name) for item in value]
    if not isinstance(value, int | float) or not value:
        raise ValueError(f"{name}: add a value to EXAMPLES")
    return 2 * value


def default_value(item: "Field[Any]") -> Any:
    """Return the default of a field."""
    return item.default_factory() if item.default_factory is not NO_DEFAULT else item.default


@cache
def plain_config() -> dict[str, Any]:
    """Return the config of a plain `train.py`, without its interpolations resolved."""
    config: Any = omegaconf.OmegaConf.to_container(Composer("train").compose([]), resolve=False)
    return dict(config)


def default_of(key: str, item: "Field[Any]") -> str:
    """Return a field's default as YAML, formatted as code, and that of a plain `train.py`."""
    value = default_value(item)
    texts = []
    if value not in (NO_DEFAULT, omegaconf.MISSING):
        texts.append(f"`{as_yaml(list(value) if isinstance(value, tuple) else value)}`")
    names = key.split(".")
    plain: Any = plain_config()
    for name in names:
        plain = plain.get(name, NO_DEFAULT) if isinstance(plain, dict) else NO_DEFAULT
    if plain not in (NO_DEFAULT, omegaconf.MISSING) and f"`{as_yaml(plain)}`" not in texts:
        choice = f"{plain_config()[names[0]]['name']}: " if texts else ""
        texts.append(f"{choice}`{as_yaml(plain)}`")
    return "; ".join(texts)


if __name__ == "__main__":
    sys.exit(main())
