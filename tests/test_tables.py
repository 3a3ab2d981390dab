import os

import pytest

from tests.tables import each


def test_each_entry_of_a_table_is_tried_and_the_one_that_fails_is_named(tmp_path):
    called = []

    @each("first, second", [(1, 2), (3, 4), (5, 6)])
    def table(tmp_path, first, second):
        called.append((tmp_path.name, first))
        assert tmp_path.is_dir()
        assert second != 4

    with pytest.raises(AssertionError) as caught:
        table(tmp_path=tmp_path)
    assert called == [("0", 1), ("1", 3)]
    assert caught.value.__notes__ == ["entry: {'first': 3, 'second': 4}"]
    with pytest.raises(AssertionError, match="without entries"):
        each("first", [])(table)


def test_what_an_entry_changes_is_undone_before_the_next(monkeypatch):
    found = []

    @each("value", ["a", "b"])
    def table(monkeypatch, value):
        found.append(os.environ.get("CREDIT_DP_TEST_ENTRY"))
        monkeypatch.setenv("CREDIT_DP_TEST_ENTRY", value)

    table(monkeypatch=monkeypatch)
    assert [*found, os.environ.get("CREDIT_DP_TEST_ENTRY")] == [None] * 3
