"""The train command (`python train.py`, `credit-dp train`); plan and verify share its parser."""

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import NamedTuple, get_args, get_origin

from hydra.core.override_parser.types import Override

from credit_dp.cli.arguments import OneLineParser, common_parser, parse_arguments, train_parser
from credit_dp.cli.check_run import check_and_report, check_sweep
from credit_dp.cli.compose import Composer, check_run_config, without_hydra
from credit_dp.cli.overrides import (
    TEXT_KEYS,
    accepts_text,
    annotated_yaml,
    describe_key,
    type_of_key,
)
from credit_dp.cli.saved_config import overrides_of_run
from credit_dp.cli.start_run import run_once
from credit_dp.cli.sweep import check_combinations, check_is_no_launcher, sweep
from credit_dp.config import Config
from credit_dp.errors import UserError

HELP = """\
{program} KEY=VALUE ...: trains a model.

KEY=VALUE sets keys of the config; options begin with a dash:
  --cfg job         show the config that these overrides give, and stop (--resolve, --package)
  --check           check the config, open and check the data, plan the model and estimate its
                    memory, and stop; with --multirun, check all configs and their data
  --again RUN       repeat the run in this folder; KEY=VALUE changes it
  --multirun, -m    one run for each combination: model=unet,unet_small seed=0,1,2
  --config-dir DIR  another folder of config files, besides ./conf
  --help, -h        this text

Exit code of --check: 0 if the run would start, 1 if the model can't be sharded on the mesh, 2 for a
mistake, 3 if the config is right but the data are remote and can't be reached.

Groups and their choices (GROUP=CHOICE):
{groups}

Keys, with the values that these overrides give (KEY=VALUE):
{config}
"""


def train(arguments: Sequence[str], program: str) -> int:
    """Compose and check the config, then run it once or as a sweep; return the exit code.

    Raises:
        UserError: something is wrong, and no process has been started.
    """
    args = parse_arguments(train_parser(), arguments)
    composer = Composer("train", args.config_dir, args.config_name)
    if args.shell_completion:
        composer.hydra.shell_completion(args.config_name, args.overrides)
        return 0
    earlier = [] if args.again is None else overrides_of_run(args.again, args.overrides, composer)
    overrides = composer.parse([*earlier, *args.overrides])
    texts = [str(override.input_line) for override in overrides]
    # The override is how Hydra itself switches to a sweep.
    multirun = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
    if args.help or args.cfg:
        if not multirun:
            check_single_values(overrides)
        print_help_or_config(composer, args, texts, program)
        return 0
    if multirun:
        if args.check:
            return check_sweep(check_combinations(composer, overrides))
        return sweep(composer, overrides, config_folder_options(args))
    check_is_no_launcher(overrides)
    config = compose_run(composer, overrides)
    check_run_config(config)
    if args.check:
        return check_and_report(config, texts)
    return run_once(composer, texts, config)


def config_folder_options(args: Namespace) -> list[str]:
    """Return the options that name folders of config files, for runs in other processes."""
    folder = [] if args.config_dir is None else ["--config-dir", str(args.config_dir)]
    return [*folder, "--config-name", args.config_name]


def print_help_or_config(
    composer: Composer, args: Namespace, texts: Sequence[str], program: str
) -> None:
    """Print the help or the composed config."""
    composed = composer.compose(texts)
    if args.cfg:
        composer.hydra.show_cfg(args.config_name, list(texts), args.cfg, args.package, args.resolve)
        return
    groups = composer.groups.items()
    lines = [f"  {name}: {', '.join(choices)}" for name, choices in groups if "/" not in name]
    config = "\n".join(annotated_yaml(without_hydra(composed)))
    text = HELP.format(program=program, groups="\n".join(lines), config=f"{config}\n")
    sys.stdout.write(text)


def compose_run(composer: Composer, overrides: Sequence[Override]) -> Config:
    """Return the checked config of a single run."""
    check_single_values(overrides)
    return composer.compose_config([str(override.input_line) for override in overrides])


def check_single_values(overrides: Sequence[Override]) -> None:
    """Refuse several values of a key, which make a sweep."""
    for override in overrides:
        if override.is_sweep_override():
            key, _, value = str(override.input_line).lstrip("+").partition("=")
            key_type = type_of_key(key)
            other = ""
            is_list = any(get_origin(each) is list for each in (key_type, *get_args(key_type)))
            if key == "data.grid" and re.fullmatch(r"\d+,\d+", value):
                other = f" A grid is {key}={value.replace(',', 'x')}."
            elif is_list or key in TEXT_KEYS:
                other = f" A list is {key}=[{value}]."
            elif accepts_text(key, value):
                other = f" One text with a comma is '{key}=\"{value}\"'."
            elif key_type is not None and not is_dataclass(key_type):
                other = f" One run takes {describe_key(key)}."
            raise UserError(f"{key}: several values need --multirun.{other}")


class ConfigArguments(NamedTuple):
    """A checked config, whether to print JSON, and the command's options."""

    config: Config
    json: bool
    options: argparse.Namespace


def read_config_arguments(
    arguments: Sequence[str],
    program: str,
    help_text: str,
    add_options: Callable[[OneLineParser], None] = lambda parser: None,
) -> ConfigArguments | None:
    """Parse a command line and compose its config; None after printing the help, if requested."""
    parser = common_parser()
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    args = parse_arguments(parser, arguments)
    if args.help:
        sys.stdout.write(help_text.format(program=program))
        return None
    composer = Composer(program.rpartition(" ")[2])  # imports the user's plug-ins, too
    config = compose_run(composer, composer.parse(args.overrides))
    return ConfigArguments(config, args.json, args)
