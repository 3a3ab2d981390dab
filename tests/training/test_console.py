"""Console output: bars on a terminal, few lines elsewhere, nothing on other ranks."""

import io

from rich.console import Console

from credit_dp.training import console
from credit_dp.training.console import Screen


def shown(terminal: bool) -> tuple[Screen, io.StringIO]:
    text = io.StringIO()
    return Screen(Console(file=text, force_terminal=terminal, width=200)), text


def test_without_a_terminal_a_thousand_steps_are_few_lines():
    screen, text = shown(terminal=False)
    with screen.bar("training", 1000) as bar:
        for step in range(1, 1001):
            bar(step, "loss 0.1")
    lines = text.getvalue().splitlines()
    assert 1 <= len(lines) < 20
    assert lines[-1].startswith("training 1000/1000  loss 0.1  ")
    assert "\x1b" not in text.getvalue()


def test_a_terminal_gets_a_bar_with_counts_and_note():
    screen, text = shown(terminal=True)
    with screen.bar("training", 10, done=5) as bar:
        bar(10, "loss 0.1")
    assert "10/10" in text.getvalue()
    assert "loss 0.1" in text.getvalue()


def test_parts_are_announced_when_they_begin_and_end_and_are_bars_on_a_terminal():
    screen, text = shown(terminal=False)
    with screen.report() as report:
        for part in ("climate", "statistics"):
            for done in range(101):
                report(part, done / 100)
    assert text.getvalue().splitlines() == [
        f"{part} {percent} %" for part in ("climate", "statistics") for percent in (0, 100)
    ]
    screen, text = shown(terminal=True)
    with screen.report() as report:
        report("climate", 1.0)
    assert "climate" in text.getvalue()


def test_paths_are_neither_wrapped_nor_taken_for_markup():
    text = io.StringIO()
    screen = Screen(Console(file=text, width=20))
    screen.show("checkpoint [/tmp/a very/long path/of a run]/checkpoint.pt")
    assert text.getvalue() == "checkpoint [/tmp/a very/long path/of a run]/checkpoint.pt\n"


def test_other_ranks_tell_only_of_preparations_that_they_make(capsys):
    screen = Screen(None)
    screen.show("hello")
    with screen.bar("training", 10) as bar, screen.report():
        bar(10)
    assert capsys.readouterr().out == ""
    with screen.report() as report:
        report("climate", 0.5)
    assert capsys.readouterr().out == "climate 50 %\n"


def test_the_remaining_time_is_that_of_the_remaining_work(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    screen, text = shown(terminal=False)
    with screen.bar("training", 100, 50, work=lambda n: max(0, n - 50) ** 2) as bar:
        clock[0] = 20.0
        bar(60)
    assert text.getvalue() == "training 60/100  0.50/s  8 min left\n"  # 20 s for 100 of 2,500
