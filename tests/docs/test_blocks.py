"""Every block of the README and the docs runs, and the test command of the README is CI's."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from tests.commands import run, run_line
from tests.data import anemoi_stores, stores, wrf_files
from tests.docs import era5
from tests.plots import DRAW_PLOTS
from tests.tables import entry

ROOT = Path(__file__).parents[2]
# These run from beginning to end in `test_clean_clone`.
IN_CLONE = [
    ROOT / "docs" / name for name in ("installation.md", "first-forecast.md", "regional.md")
]
DOCS = sorted({*(ROOT / "docs").glob("*.md")} - {*IN_CLONE})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block that begins with a file's name, maybe after Hydra's header, is in that file when the
# commands of the page run.
FILE = re.compile(r"(?:# @package _global_\n)?# (\w+\.(?:py|ya?ml))\n")
# A training command of a page is run at this size; `make` targets are looked at, not run.
SMALL = "experiment=fast trainer.evaluate_stride_hours=2000"  # one forecast is scored
STEPS = "trainer.steps=2"  # unless the command says how many
# On these pages only the length is changed: most are about a store, one about experiments.
OWN_STORE = "model=unet_tiny trainer.evaluate_stride_hours=2000 logger=csv"
SHORT = {
    "your-era5.md": OWN_STORE,
    "data-regions.md": OWN_STORE,
    "physics.md": OWN_STORE,
    "cluster.md": OWN_STORE,
    "import.md": "trainer.evaluate_stride_hours=2000 trainer.patience=null "
    "trainer.validate_every=0 logger=csv",
}
# Pages of features that the tests of their own folders train with: their commands run in the widest
# tier, and are composed in the long one.
OF_FEATURES = {
    *("cluster.md", "diffusion.md", "ensembles.md", "evaluating.md", "forecasting.md", "loss.md"),
    *("metrics.md", "models.md", "optimizer.md", "physics.md", "rollouts.md", "training.md"),
    *("which-parallelism.md",),
}
# Pages whose trainings draw plots: one of the quickstart, and one of a store with 13 levels.
DRAWN = {"models.md", "evaluating.md"}
# With fewer ranks: `tests/distributed/test_training.py` trains on four bands and on three axes.
FEWER = {
    "parallel.domain=4": "parallel.domain=2",
    "--nproc-per-node 4": "--nproc-per-node 2",
    "parallel.pipeline=2 parallel.data=2": "parallel.pipeline=2",
}
# The store that a page copies from a server lies beside the reader's own here, in the same layout.
SERVER = "gs://weatherbench2/datasets/era5/"
# The climate of `experiment=fast`, for a script that knows no experiments.
CLIMATE = (
    "data.grid=24x48 data.quickstart.truncation=15 data.quickstart.runs=2 "
    "data.quickstart.run_days=20 data.quickstart.spinup_days=5 "
    "data.dates.train=[2001-01-01T00,2001-01-20T18] "
    "data.dates.valid=[2001-01-31T00,2001-02-09T18] "
    "data.dates.test=[2001-02-10T00,2001-02-19T18]"
)
# Commands that may lack something here: their messages, and the exit codes that are allowed.
ELSEWHERE = {
    "data=weatherbench2 model=unet_base": ("can't be reached from here", (0, 3)),  # the network
    "data.store=/data/era5.zarr": ("/data/era5.zarr: no such zarr store", (2,)),
}


def _files(page):
    """Return the content of the files that a page shows, by name."""
    blocks = [text for _, text in BLOCK.findall(page.read_text())]
    return {found[1]: text for text in blocks if (found := FILE.match(text))}


def _trains(line):
    looks = (" --help", " --cfg", " --check")
    return "train.py" in line and not any(look in line for look in looks)


def _lines(block):
    """The commands of a block, continued lines joined."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder: the entry, the config and the scripts, a store, and an empty cache."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("train.py", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("conf", "scripts"):
        shutil.copytree(ROOT / name, folder / name)
    era5.write(folder / "era5.zarr")
    era5.write_as_on_the_server(folder)
    era5.write_others(folder)
    anemoi_stores.write(stores.dataset(24, 48, 40), folder / "anemoi.zarr")
    wrf_files.write(wrf_files.dataset("lat-lon"), folder)
    return folder


def _environment(user):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cache = str(user / "cache")
    return {**os.environ, "PATH": path, "CREDIT_DP_CACHE": cache, "WANDB_MODE": "disabled"}


def test_pages_have_only_known_languages():
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text())}
    assert kinds <= {"bash", "python", "text", "yaml"}


class Page:
    """The blocks of a page, in order: later ones may use what those before have left."""

    page: Path

    def test_block_runs(self, language, block, user):
        if language == "python":
            done = run(["python", "-W", "error", "-c", block], user, _environment(user))
            assert done.returncode == 0, done.stderr
        elif language == "bash":
            for name, text in _files(self.page).items():
                (user / name).write_text(text)
            for line in _lines(block):
                _run_line(line, self.page, user)


def pytest_generate_tests(metafunc):
    """A test for each block of a page."""
    if "block" in metafunc.fixturenames:
        blocks = BLOCK.findall(metafunc.cls.page.read_text())
        metafunc.parametrize(("language", "block"), blocks, ids=range(len(blocks)))


def _run_line(line, page, user):
    command = line = line.replace(SERVER, "")
    if line.startswith("make "):
        command = line.replace("make ", "make -n ", 1)
    elif "/data/era5.zarr" in line:
        command = f"{line} --check"
    elif _trains(line):
        for many, few in FEWER.items():
            line = line.replace(many, few)
        steps = "" if "trainer.steps=" in line else STEPS
        command = f"{line} {SHORT.get(page.name, SMALL)} {steps}"
    elif "quickstart_realism.py" in line:
        command = f"{line} {CLIMATE}"
    environment = _environment(user)
    if page.name in DRAWN:
        environment[DRAW_PLOTS] = "1"
    done = run_line(command, user, environment)
    what, codes = next((said for key, said in ELSEWHERE.items() if key in line), ("", (0,)))
    said = f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.returncode in codes, said
    assert done.returncode == 0 or what in said, said


# A class for each page, so that several workers share the pages.
for _page in filter(lambda page: BLOCK.search(page.read_text()), PAGES):
    _name = f"Test{_page.stem.title().replace('-', '')}"
    _tier = pytest.mark.exhaustive if _page.name in OF_FEATURES else pytest.mark.slow
    globals()[_name] = _tier(type(_name, (Page,), {"page": _page}))


@pytest.mark.slow
def test_trainings_of_the_other_pages_have_keys_and_values_that_exist():
    lines = [
        (page.name, line)
        for page in DOCS
        if page.name in OF_FEATURES
        for language, block in BLOCK.findall(page.read_text())
        if language == "bash"
        for line in filter(_trains, _lines(block))
        if "--" not in line and "CREDIT_DP_PLUGINS" not in line  # of a page's own plug-in
    ]
    assert len(lines) >= 40
    compose = Composer("train").compose_config
    for name, line in lines:
        given = parse_overrides(shlex.split(line.partition("train.py")[2], comments=True))
        with entry(f"{name}: {line}"):
            compose([str(override.input_line) for override in given])


def _anchors(page):
    """Return the anchors of a page: GitHub's for its headings, and its own."""
    text = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def test_links_lead_somewhere():
    broken = []
    for page in [*PAGES, *IN_CLONE, ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", BLOCK.sub("", page.read_text())):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append((page.stem, link))
    assert broken == []


def test_figures_have_alternative_text():
    figures = [
        text
        for page in [*PAGES, *IN_CLONE]
        for text in re.findall(r"!\[([^]]*)\]\(", page.read_text())
    ]
    assert len(figures) >= 3
    assert all(len(text) > 20 for text in figures)


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test\n" in (ROOT / "README.md").read_text()
    assert " make test\n" in (ROOT / ".ci/run").read_text()


def test_files_that_the_map_names_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:credit_dp/)?[a-z_]+/[a-z_/]*(?:\.py)?)`", text)
    assert len(named) > 30
    missing = [
        name
        for name in named
        if not (ROOT / "credit_dp" / name.removeprefix("credit_dp/")).exists()
    ]
    assert not missing


def _definitions(path):
    """Return the names that a module defines, and those of methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (x.name for x in node.body if isinstance(x, ast.FunctionDef))
            names |= {f"{node.name}.{name}" for name in methods}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_calls_that_the_map_names_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    calls = re.findall(r"`([a-z_/]+\.py)`: `([\w.]+)`", text)
    assert len(calls) > 50
    missing = [
        (path, name) for path, name in calls if name not in _definitions(ROOT / "credit_dp" / path)
    ]
    assert not missing
