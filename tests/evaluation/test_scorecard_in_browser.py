"""A scorecard in a real browser without network is complete and readable."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from credit_dp.evaluation.score_folder import scorecard_page
from tests.evaluation import forecasts

if TYPE_CHECKING:
    from selenium import webdriver

pytestmark = pytest.mark.slow
PROGRAMS = ("chromium", "chromedriver")
INSTALL = "apt-get install -y --no-install-recommends chromium chromium-driver"
WIDTHS = (1280, 400)  # of a laptop and of a phone, in pixels
CONTRAST = 4.5  # of text. Source: Web Content Accessibility Guidelines 2.1, level AA
FORMS = (pytest.param("one", marks=pytest.mark.exhaustive), "ensemble")
LONG = "a_forecast_with_a_name_that_nobody_would_want_to_break_over_two_lines_of_a_phone"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")

TABLES = """
return [...document.querySelectorAll('table')].map(table => [...table.rows].map(
  row => [...row.cells].map(cell => [cell.tagName, cell.colSpan, cell.innerText.trim()])));
"""
IMAGES = """
return [...document.images].map(
  i => [i.alt, i.complete, i.naturalWidth, i.getBoundingClientRect().width]);
"""
# Whatever is wide, and whether the box around it scrolls.
BOXES = """
return [...document.querySelectorAll('table, img')].map(
  e => [e.outerHTML.slice(0, 60), getComputedStyle(e.parentElement).overflowX]);
"""
# The contrast of every element that has text of its own with what lies behind it.
CONTRASTS = """
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const light = colour => numbers(colour).slice(0, 3).map(x => x / 255)
  .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
  .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const clear = colour => numbers(colour)[3] === 0;
const behind = e => !e ? 'rgb(255, 255, 255)' : clear(getComputedStyle(e).backgroundColor)
  ? behind(e.parentElement) : getComputedStyle(e).backgroundColor;
return [...document.body.querySelectorAll('*')]
  .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()))
  .map(e => [light(getComputedStyle(e).color), light(behind(e)), e.innerText])
  .map(([a, b, text]) => [text, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
"""
HEADINGS = (
    "return [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => Number(h.tagName[1]))"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Chromium without a window, in which no address of the network resolves."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    found = {name: shutil.which(name) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)}: not installed. {INSTALL}")
    options = webdriver.ChromeOptions()
    options.binary_location = str(found["chromium"])
    for argument in (
        "--headless=new",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root can't have one
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With both paths given selenium looks for nothing, and downloads nothing.
    driver = webdriver.Chrome(options, Service(str(found["chromedriver"])))
    yield driver
    driver.quit()


@pytest.fixture(scope="module", params=FORMS)
def scorecard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`scorecard.html` of three variables with units, and a name that is long."""
    folder = tmp_path_factory.mktemp("scorecard")
    observed = forecasts.truth(rows=25, columns=48)
    for name, unit in zip(forecasts.NAMES, ("m**2 s**-2", "K", "K"), strict=True):
        observed[name].attrs["units"] = unit
    made = forecasts.forecast(observed, members=3)
    if request.param == "one":
        made = forecasts.without_members(made)
    forecasts.write(observed, folder / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), folder / "climatology.zarr")
    card = forecasts.scored(folder, forecasts.write(made, folder / f"{LONG}.zarr"))
    path = folder / "scorecard.html"
    path.write_text(scorecard_page(card), encoding="utf-8")
    return path


@pytest.fixture(params=WIDTHS)
def opened(
    request: pytest.FixtureRequest, browser: webdriver.Chrome, scorecard: Path
) -> webdriver.Chrome:
    """The browser with the page at one of the widths."""
    show(browser, scorecard, request.param)
    return browser


def show(browser: webdriver.Chrome, path: Path, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for log in ("browser", "performance"):
        browser.get_log(log)  # reading the log empties it
    browser.get(path.as_uri())


def requests(browser: webdriver.Chrome) -> list[str]:
    """Return every address that the page has requested."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


def test_the_page_needs_no_network_and_raises_no_error(
    opened: webdriver.Chrome, scorecard: Path
) -> None:
    urls = requests(opened)
    assert scorecard.as_uri() in urls
    assert [url for url in urls if not url.startswith(("file:", "data:"))] == []
    assert [url for url in urls if url.startswith("file:")] == [scorecard.as_uri()]
    assert opened.get_log("browser") == []
    assert opened.title == f"Scorecard of {scorecard.parent / LONG}.zarr"


def test_a_page_that_asks_the_network_would_be_noticed(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text('<title>x</title><img src="http://example.org/plot.png">', encoding="utf-8")
    show(browser, path, WIDTHS[0])
    assert "http://example.org/plot.png" in requests(browser)
    assert browser.get_log("browser") != []
    assert [wide for _, _, wide, _ in browser.execute_script(IMAGES)] == [0]


def test_images_are_loaded_and_large_enough_to_read(opened: webdriver.Chrome) -> None:
    images = opened.execute_script(IMAGES)
    assert len(images) >= 8  # scores, spectra of three bands, maps
    for alt, complete, natural, shown in images:
        assert complete, alt
        assert natural > 600, alt
        assert shown > 0.9 * natural, f"{alt}: is drawn too small to be read"
    texts = [alt for alt, *_ in images]
    assert all(len(alt.split()) >= 3 for alt in texts)
    assert len(set(texts)) == len(texts)


def test_tables_are_whole_and_their_numbers_readable(opened: webdriver.Chrome) -> None:
    tables = opened.execute_script(TABLES)
    cards, tables = tables[:2], tables[2:]
    assert len(tables) >= 4
    for heading, *rows in cards:
        assert [kind for kind, _, _ in heading] == ["TH"] * len(heading)
        cells = [text for row in rows for kind, _, text in row if kind == "TD"]
        assert cells
        assert all(re.fullmatch(r"0|[+\N{MINUS SIGN}]\d+", text) for text in cells), cells
    for rows in tables:
        assert len({sum(span for _, span, _ in row) for row in rows}) == 1
        head, body = rows[1], rows[2:]
        assert all(kind == "TH" and text for kind, _, text in head)
        assert len(body) == 7
        for name, unit, *cells in body:
            assert name[2]
            assert unit[2] in ("m² s⁻²", "K", "1")
            assert all(NUMBER.fullmatch(text) for _, _, text in cells), cells


def test_nothing_reaches_over_the_edge(opened: webdriver.Chrome) -> None:
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    boxes = opened.execute_script(BOXES)
    assert [what for what, overflow in boxes if overflow != "auto"] == []


def test_text_stands_out_and_headings_are_in_order(opened: webdriver.Chrome) -> None:
    contrasts = opened.execute_script(CONTRASTS)
    assert len(contrasts) > 100
    assert [(text, ratio) for text, ratio in contrasts if ratio < CONTRAST] == []
    levels = opened.execute_script(HEADINGS)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_page_is_dark_and_readable_in_a_browser_that_prefers_it(
    browser: webdriver.Chrome, scorecard: Path
) -> None:
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    show(browser, scorecard, WIDTHS[0])
    style = "return getComputedStyle(document.documentElement).backgroundColor"
    red, green, blue = map(int, re.findall(r"\d+", browser.execute_script(style)))
    assert max(red, green, blue) < 50
    contrasts = browser.execute_script(CONTRASTS)
    assert [(text, ratio) for text, ratio in contrasts if ratio < CONTRAST] == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
