"""The web site: its menu, search, anchors and filter, as a browser without a network shows them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]
OPTIONS = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--virtual-time-budget=10000"]
FILTERED = """
<script>
  addEventListener("load", () => {
    const box = document.querySelector(".filter-keys");
    box.value = "RATE warm";
    box.dispatchEvent(new Event("input"));
  });
</script>
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as `make docs` builds them, where a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--builder", "html"]
    command += ["--conf-dir", "docs", "--doctree-dir", str(folder / "doctrees")]
    done = subprocess.run(
        [*command, ".", str(folder / "html")],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def shown(page: Path, query: str = "") -> str:
    """Return a page after its scripts have run, in Chromium that reaches no address."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium: not installed (see .ci/run)"
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    done = subprocess.run(
        [chromium, *OPTIONS, offline, "--dump-dom", f"{page.as_uri()}{query}"],
        capture_output=True, text=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    return done.stdout


def test_the_menu_has_each_page_once(site: Path) -> None:
    page = (site / "docs/index.html").read_text()
    menu = page[page.index('class="sidebar-tree"') : page.index('class="main"')]
    links = re.findall(r'<a class="reference internal" href="([^"]+)">(.*?)</a>', menu)
    assert len(links) > 40
    assert menu.count('<li class="toctree-l1') < 30  # the others are below these
    for part in zip(*links, strict=True):  # addresses, then titles
        assert sorted(part) == sorted(set(part))
    assert links[0][0] == "installation.html"


def test_pages_need_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|link)\b[^>]* (?:src|href)=\"(https?:[^\"]+)")
    for page in site.glob("*/*.html"):
        assert loaded.findall(page.read_text()) == [], page


def test_the_reference_has_what_users_import(site: Path) -> None:
    reference = site / "docs/reference"
    page = (reference / "python.html").read_text()
    names = re.findall(r'<dt class="sig[^>]* id="([\w.]+)"', page)
    assert names[0] == "credit_dp.domain_parallel.convert_to_domain_parallel"
    assert names[1] == "credit_dp.domain_parallel.DomainParallelManager"
    assert "credit_dp.load" in names
    internal = ("DomainParallelConv2d", "HaloExchange", "RowPartition", "Transposition")
    for path in reference.glob("*.html"):
        assert not [name for name in internal if f'{name}"' in path.read_text()], path


def test_each_key_has_an_anchor(site: Path) -> None:
    page = (site / "docs/keys.html").read_text()
    keys = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/keys.md").read_text(), re.MULTILINE))
    assert len(keys) > 150
    for key in keys:
        assert page.count(f' id="{key}"') == 1, key


def test_the_filter_leaves_the_rows_with_all_its_words(site: Path) -> None:
    page = site / "docs/filtered.html"
    page.write_text((site / "docs/keys.html").read_text().replace("</body>", f"{FILTERED}</body>"))
    rows = re.findall(r"<tr[^>]*>.*?</tr>", shown(page), re.DOTALL)
    left = [row for row in rows if 'hidden=""' not in row and "<td>" in row]
    keys = [re.search(r'href="#([\w.]+)"', row)[1] for row in left]  # type: ignore[index]
    assert keys == ["optimizer.lr", "optimizer.warmup_steps"]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("install", "docs/installation.html"),
        ("GPU", "docs/gpus.html"),
        ("out+of+memory", "#out-of-memory"),
        ("trainer.steps", "docs/keys.html"),
    ],
)
def test_search_finds_the_page(words: str, page: str, site: Path) -> None:
    found = shown(site / "search.html", f"?q={words}")
    results = found[found.index('id="search-results"') :]
    assert any(page in link for link in re.findall(r'<a href="([^"?]+)[^"]*"', results)[:5])
