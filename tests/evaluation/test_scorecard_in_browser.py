"""A scorecard in a real browser without network is complete and readable."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from credit_dp.evaluation.comparison import compare, comparison_page, read_result
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
FIGURES = """
return [...document.images].filter(i => i.src.startsWith('data:image/svg'))
  .map(i => [i.alt, i.src, i.getBoundingClientRect().width]);
"""
STATES = """
return [...document.getElementById(arguments[0]).querySelectorAll('thead tr:last-child th')]
  .map(heading => heading.getAttribute('aria-sort'));
"""
LEAST_PIXELS = 11  # of letters
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


def test_letters_of_figures_are_as_large_as_those_of_a_page(opened: webdriver.Chrome) -> None:
    figures = opened.execute_script(FIGURES)
    assert len(figures) >= 4
    for alt, source, shown in figures:
        text = base64.b64decode(source.partition("base64,")[2]).decode()
        width = re.search(r'viewBox="0 0 ([\d.]+) ', text)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )*([\d.]+)px", text)]
        assert width, alt
        assert sizes, alt
        assert min(sizes) * shown / float(width[1]) > LEAST_PIXELS, alt


def test_a_heading_sorts_its_table(opened: webdriver.Chrome) -> None:
    check_sorting(opened, "rmse")


def check_sorting(browser: webdriver.Chrome, identifier: str) -> None:
    """Check that each heading of a table sorts its rows, both ways, and says so."""
    body = f"return [...document.getElementById('{identifier}').tBodies[0].rows].map("
    body += "row => [...row.cells].map(cell => cell.innerText.trim()))"
    buttons = browser.find_elements("css selector", f"#{identifier} thead tr:last-child th button")
    rows = browser.execute_script(body)
    assert len(buttons) == len(rows[0])
    for column, button in enumerate(buttons):
        for state in ("ascending", "descending"):
            browser.execute_script("arguments[0].focus()", button)
            button.send_keys("\n")  # as by a click
            states = browser.execute_script(STATES, identifier)
            assert states == [state if c == column else None for c in range(len(buttons))]
            found = browser.execute_script(body)
            assert sorted(found) == sorted(rows)
            cells = [row[column].removesuffix(" %") for row in found]
            if all(NUMBER.fullmatch(cell.removeprefix("+")) for cell in cells):
                ordered = sorted(cells, key=float, reverse=state == "descending")
                assert list(map(float, cells)) == list(map(float, ordered))
            else:
                steps = pairwise([(re.sub(r"\d+", lambda n: n[0].zfill(6), x)) for x in cells])
                signs = [(a > b) - (a < b) for a, b in steps]
                assert set(signs) <= ({-1, 0} if state == "ascending" else {1, 0})


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_fits_its_width_and_can_be_sorted(
    browser: webdriver.Chrome, tmp_path: Path, width: int
) -> None:
    results = []
    for number in range(3):
        folder = tmp_path / f"{number}{LONG}"
        folder.mkdir()
        errors = {
            channel: {
                f"{hours}h": {"model": (c + number) * hours, "persistence": 90, "climatology": 80}
                for hours in (24, 72, 120)
            }
            for c, channel in enumerate(("t_500", "t_1000", "2m_temperature"), 1)
        }
        units = dict.fromkeys(errors, "K")
        found = {"step": 1, "initial_times": 2, "units": units, "rmse": errors}
        (folder / "metrics.json").write_text(json.dumps(found))
        (folder / "config.yaml").write_text(f"seed: {number}\n")
        results.append(read_result(folder, folder.name))
    path = tmp_path / "comparison.html"
    path.write_text(comparison_page(compare(results)), encoding="utf-8")
    show(browser, path, width)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    boxes = browser.execute_script(BOXES)
    assert [what for what, overflow in boxes if overflow != "auto"] == []
    check_sorting(browser, "rmse")
    check_sorting(browser, "config")
    assert browser.get_log("browser") == []


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
