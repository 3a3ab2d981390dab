"""Each rank's log file has what is logged and warned about; the terminal has what it had."""

import io
import logging
import re
import warnings
from contextlib import contextmanager

import pytest

from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.worker import configure_logging, pop_early_records
from credit_dp.training.console import notes_of
from credit_dp.training.run_folder import log_to_file
from tests.full_disk import full_disk

OURS = logging.getLogger("credit_dp")


@contextmanager
def terminal(level):
    """Set up a terminal as ranks do, and return what the package's loggers print."""
    shown = io.StringIO()
    before = OURS.handlers, OURS.propagate, OURS.level
    OURS.handlers, OURS.propagate = [logging.StreamHandler(shown)], False
    OURS.setLevel(level)
    try:
        yield shown
        assert (OURS.handlers[0].level, OURS.level) == (logging.NOTSET, level)
    finally:
        OURS.handlers, OURS.propagate = before[:2]
        OURS.setLevel(before[2])


def messages(path):
    """The lines of a file without their times, which have to be there."""
    lines = path.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[rank \d+\] ", x) for x in lines)
    return [line.split("] ", 1)[1] for line in lines]


def test_all_ranks_keep_what_only_the_first_one_shows(tmp_path):
    with terminal(logging.WARNING) as shown, log_to_file(tmp_path, 3):
        logging.getLogger("credit_dp.data").info("reads %s", "rows")
        logging.getLogger("credit_dp.data").warning("slow")
        logging.getLogger("credit_dp.data").debug("unheard")
    assert shown.getvalue() == "slow\n"
    first, *between, last = messages(tmp_path / "logs" / "rank-3.log")
    assert between == ["INFO credit_dp.data: reads rows", "WARNING credit_dp.data: slow"]
    assert "started as process" in first
    assert last.endswith("ended")


def test_a_later_start_appends(tmp_path):
    for number in range(2):
        with terminal(logging.INFO) as shown, log_to_file(tmp_path, 0):
            OURS.info("start %s", number)
        assert shown.getvalue() == f"start {number}\n"
    lines = messages(tmp_path / "logs" / "rank-0.log")
    assert [line for line in lines if "start " in line] == [
        "INFO credit_dp: start 0",
        "INFO credit_dp: start 1",
    ]


def test_messages_and_warnings_are_in_the_file_and_on_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with warnings.catch_warnings(record=True) as seen, terminal(logging.INFO) as shown:
        warnings.simplefilter("always")
        with log_to_file(tmp_path, 0):
            logging.getLogger("other").warning("of a library")
            warnings.warn("will change", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["will change"]
    assert "of a library" in capsys.readouterr().err
    assert shown.getvalue() == ""
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "WARNING other: of a library\n" in text
    assert "FutureWarning: will change\n" in text
    assert logging.getLogger().handlers == []


def test_the_error_that_ends_a_run_is_in_the_file(tmp_path):
    with terminal(logging.INFO) as shown, pytest.raises(ZeroDivisionError):
        with log_to_file(tmp_path, 0):
            raise ZeroDivisionError("by nothing")
    assert shown.getvalue() == ""
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert text.endswith("ZeroDivisionError: by nothing\n")
    assert "Traceback" in text


def test_a_full_disk_or_a_folder_that_cannot_be_created_is_one_warning(tmp_path, capsys):
    with terminal(logging.INFO) as shown, full_disk(300), log_to_file(tmp_path, 0):
        for number in range(1000):
            OURS.info("line %s", number)
    lines = shown.getvalue().splitlines()
    assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(1000)]
    (warning,) = [line for line in lines if not line.startswith("line")]
    assert warning.endswith("rank-0.log: could not be written ([Errno 27] File too large).")
    assert capsys.readouterr().err == ""
    assert (tmp_path / "logs" / "rank-0.log").stat().st_size == 300
    (tmp_path / "logs").rename(tmp_path / "old")
    (tmp_path / "logs").touch()  # no folder can be created
    with terminal(logging.INFO) as shown, log_to_file(tmp_path, 0):
        OURS.info("goes on")
    first, *others = shown.getvalue().splitlines()
    assert first.endswith("the log can't be written there (File exists).")
    assert others == ["goes on"]


def test_lines_from_before_there_is_a_file_are_kept_for_it(tmp_path, capsys):
    """The terminal shows warnings alone; what users should know of the data is a note."""
    before = OURS.handlers, OURS.propagate, OURS.level
    try:
        configure_logging(RankInfo())
        logging.getLogger("credit_dp.data.sources").info("reads z as geopotential")
        logging.getLogger("credit_dp.domain_parallel").info("4 layers")
        logging.getLogger("credit_dp.data").warning("slow")
        early = pop_early_records()
        assert notes_of(early) == ["reads z as geopotential"]
        with log_to_file(tmp_path, 0, early):
            OURS.info("later")
        assert pop_early_records() == []
    finally:
        OURS.handlers, OURS.propagate = before[:2]
        OURS.setLevel(before[2])
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "WARNING credit_dp.data: slow\n")
    lines = [line.partition(": ")[2] for line in messages(tmp_path / "logs" / "rank-0.log")]
    assert lines[1:-1] == ["reads z as geopotential", "4 layers", "slow", "later"]
