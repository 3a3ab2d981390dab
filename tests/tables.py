"""Tables of cases that are one test, which names the entry that fails."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Test = Callable[..., None]


@contextmanager
def entry(name: object) -> Iterator[None]:
    """Name the entry of a table that fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"entry: {name}")
        raise


def each(names: str, table: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test once for each entry of a table, and name the entry that fails.

    The arguments are those of `pytest.mark.parametrize`. Each entry has a folder `tmp_path` of its
    own, and what it changes by `monkeypatch` is undone after it.
    """
    keys = names.replace(",", " ").split()

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        entries = list(table)
        assert entries, "a table without entries tests nothing"

        @functools.wraps(test)
        def loop(*args: Any, **fixtures: Any) -> None:
            for number, values in enumerate(entries):
                given = dict(zip(keys, values if len(keys) > 1 else (values,), strict=True))
                with entry(given):
                    _call(test, args, fixtures, given, str(number))

        left = [x for name, x in signature.parameters.items() if name not in keys]
        loop.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return loop

    return decorate


def _call(test: Test, args: Any, fixtures: dict[str, Any], given: Any, folder: str) -> None:
    fixtures = dict(fixtures)
    if "tmp_path" in fixtures:
        fixtures["tmp_path"] /= folder
        fixtures["tmp_path"].mkdir()
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in fixtures:
            fixtures["monkeypatch"] = patch
        test(*args, **fixtures, **given)
