"""Tables of differences: percent, colours, lead times."""

import re

import numpy as np

from credit_dp.evaluation.pages import (
    COLOUR_LIMITS,
    COLOURS,
    SignificanceTable,
    by_variable,
    coloured_cell,
    difference_table,
    render_page,
    shown_lead_indices,
    triangle,
    variable_and_level,
)

CONTRAST = 4.5  # Source: Web Content Accessibility Guidelines 2.1, level AA


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_cells_are_blue_where_better_and_red_where_worse_and_always_readable() -> None:
    for percent, text, colour in (
        (-20.0, "\u221220", COLOURS[0]),
        (0.2, "0", None),
        (-0.2, "0", None),
        (20.0, "+20", COLOURS[-1]),
        (900.0, "+900", COLOURS[-1]),
    ):
        cell = coloured_cell(percent, 20)
        assert cell.text == text
        assert colour is None or cell.background == colour
    for percent in np.linspace(-25, 25, 101):
        cell = coloured_cell(float(percent), 20)
        red, blue = int(cell.background[1:3], 16), int(cell.background[5:], 16)
        assert percent == 0 or abs(percent) < 0.5 or (red > blue) == (percent > 0), percent
        shades = sorted(map(luminance, (cell.background, cell.colour)))
        assert (shades[1] + 0.05) / (shades[0] + 0.05) >= CONTRAST, percent
    assert coloured_cell(float("nan"), 20) == ("-", "", "")


def test_a_table_has_the_difference_of_each_variable_level_and_lead_time() -> None:
    forecast = np.array([[0.0, 0.0, 0.0], [6.0, 8.0, 5.0], [9.0, 12.0, np.nan]])
    reference = np.array([[1.0, 1.0, 1.0], [8.0, 8.0, 4.0], [10.0, 10.0, 1.0]])
    names = ["geopotential_500", "geopotential_850", "2m_temperature"]
    table = difference_table(("a", "b"), names, (0, 24, 72), (forecast, reference), "card")
    assert table.leads == ["1 d", "3 d"]  # nothing is forecast at lead time 0
    found = {
        (variable, level): [cell.text for cell in cells]
        for variable, levels in table.variables
        for level, cells in levels
    }
    assert found == {
        ("geopotential", "500"): ["\u221225", "\u221210"],
        ("geopotential", "850"): ["0", "+20"],
        ("2m_temperature", ""): ["+25", "-"],
    }
    assert table.limit == 50  # beyond 20 are two of five
    assert [cell.text for cell in table.key] == ["\u221250", "\u221225", "0", "+25", "+50"]


def test_a_triangle_points_up_where_a_forecast_is_better_by_more_than_chance() -> None:
    for improvement, p, style in (
        (2.0, 0.002, "better large"),
        (2.0, 0.04, "better small"),
        (-1e-9, 0.0, "worse large"),
        (-2.0, 0.02, "worse small"),
        (2.0, 0.06, "chance"),
        (2.0, float("nan"), "chance"),
        (0.0, 0.0, "chance"),
    ):
        sign = triangle(improvement, p, "")
        assert sign.style == style
        assert sign.text == {"b": "\u25b2", "w": "\u25bc", "c": "\u00b7"}[style[0]]


def test_a_key_says_the_numbers_of_its_colours() -> None:
    for limit in COLOUR_LIMITS:
        forecast = np.full((1, 1), 1 + limit / 100 - 1e-9)
        key = difference_table(("a", "b"), ["x"], (6,), (forecast, np.ones((1, 1))), "card").key
        for cell in key:
            exact = coloured_cell(float(cell.text.replace("\u2212", "-")), limit)
            assert cell == exact, limit
        assert key[-1].text == f"+{limit}"


def test_lead_times_are_whole_days_if_there_are_some() -> None:
    assert shown_lead_indices((6, 12, 18, 24)) == [0, 1, 2, 3]
    assert shown_lead_indices((0, 12, 24, 36, 48)) == [2, 4]
    many = shown_lead_indices(tuple(range(0, 361, 24)))
    assert (len(many), many[0], many[-1]) == (12, 1, 15)
    assert shown_lead_indices((0,)) == [0]  # nothing else is stored


def test_names_are_split_at_their_level() -> None:
    for name, parts in {
        "geopotential_500": ("geopotential", "500"),
        "2m_temperature": ("2m_temperature", ""),
        "total_precipitation_24hr": ("total_precipitation_24hr", ""),
    }.items():
        assert variable_and_level(name) == parts


def test_texts_are_escaped() -> None:
    table = difference_table(
        ("<a>", "b"), ["<x>"], (6,), (np.ones((1, 1)), np.ones((1, 1))), "card"
    )
    cells = [[triangle(1, 0.001, "<y>")]]
    signs = SignificanceTable("<a>", ["1 d"], by_variable(["<x>"], cells))
    page = render_page(
        "comparison.html", title="t", names=["<a>", "b"], differences=[], warnings=[], config={},
        cards=[table], tests=[signs], scores=[], three_digits=str, percent=str,
    )  # fmt: skip
    assert not re.search("<a>|<x>|<y>", page)
    assert '<td class="better large" title="&lt;y&gt;">\u25b2</td>' in page
    assert "&lt;a&gt; against b" in page
    assert "&lt;x&gt;" in page
