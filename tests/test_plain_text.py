"""Names from data files can't command terminals or spreadsheets."""

import csv
import io

import pytest

from credit_dp.cli.output import format_table
from credit_dp.distributed.failure_report import report_error
from credit_dp.plain_text import csv_text, printable

CELLS: dict[object, str] = {
    "=HYPERLINK(1)": "'=HYPERLINK(1)",
    " +A1": "' +A1",
    "-A1+2": "'-A1+2",
    "@SUM(A1)": "'@SUM(A1)",
    "\t=A1": "' =A1",
    "-1.5e-3": "-1.5e-3",
    "+10870": "+10870",
    'Ålesund, "B"': 'Ålesund, "B"',
    "2m_temperature": "2m_temperature",
    "\x1b[2J\r\nx\x9b": r"\x1b[2J x\x9b",
    -2.5: "-2.5",
    None: "",
}


def test_cells_of_csv() -> None:
    text = csv_text(("name", "="), [(cell, 1) for cell in CELLS])
    rows = [[expected, "1"] for expected in CELLS.values()]
    assert [*csv.reader(io.StringIO(text))] == [["name", "'="], *rows]


def test_texts_on_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    wild = "a\x1b]0;title\x07\u202eb\x00\udcff"
    plain = r"a\x1b]0;title\x07\u202eb\x00\udcff"
    assert printable(f"{wild}\n\tc é °") == f"{plain}\n\tc é °"
    assert format_table(("x", "y"), [(f"{wild}\nz", "1")], left=1)[1] == f"{plain} z  1"
    report_error(f"{wild}: wrong")
    assert capsys.readouterr().err == f"error: {plain}: wrong\n"
