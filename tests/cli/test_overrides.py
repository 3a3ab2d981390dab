"""An override that does not parse is answered with a quoted one that means the same."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides, quoted_form, try_parse
from credit_dp.errors import UserError, quote, shell_argument
from tests.cli.invocation import refusal

printable = st.text(st.characters(min_codepoint=32, max_codepoint=126)).filter(
    lambda text: "${" not in text
)


@given(printable)
def test_any_text_can_be_quoted(text: str) -> None:
    parsed = try_parse(f"data.store={quote(text)}")
    assert parsed is not None
    assert parsed.value() == text


def test_the_suggestion_parses_to_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "a=b",
        "s3://bucket/x?v=1",
        "~/era5",
        "(a)",
        "a;b",
        "it's",
        'say "a=b"',
        "a\\=b=",
        "é=1",
    ]
    for value in texts:
        assert try_parse(f"data.store={value}") is None
        line = refusal(monkeypatch, f"data.store={value}")
        assert "the value needs quotes; write " in line
        (typed,) = shlex.split(line.rpartition("needs quotes; write ")[2])
        (parsed,) = parse_overrides([typed])
        assert (parsed.key_or_group, parsed.value()) == ("data.store", value)


def test_entries_of_a_list_are_quoted_one_by_one() -> None:
    form = quoted_form("data.prognostic", "[a=b, c]")
    assert form == 'data.prognostic=["a=b",c]'
    (parsed,) = parse_overrides([form])
    assert parsed.value() == ["a=b", "c"]


def test_tables_take_new_entries() -> None:
    """Their names need quotes in no file, but in Hydra's grammar."""
    (override,) = parse_overrides(["loss.variable_weight.geopotential=2"])
    assert override.input_line == "++loss.variable_weight.geopotential=2"
    for texts, weights, layout in (
        (
            ["loss.variable_weight={2m_temperature: 2}", "parallel.layout.root=cuda:0"],
            {"2m_temperature": 2.0},
            {"root": "cuda:0"},
        ),
        (
            [
                "loss.variable_weight.geopotential=2",
                "parallel.layout={root:cpu,encoder.0:cuda:0,decoder:[cpu,cpu]}",
            ],
            {"geopotential": 2.0},
            {"root": "cpu", "encoder.0": "cuda:0", "decoder": ["cpu", "cpu"]},
        ),
        (
            ["loss.variable_weight={}", "parallel.layout={root: cuda:0, head: [cuda:1, cuda:0]}"],
            {},
            {"root": "cuda:0", "head": ["cuda:1", "cuda:0"]},
        ),
    ):
        overrides = [str(override.input_line) for override in parse_overrides(texts)]
        config = Composer("train").compose_config(overrides)
        assert (config.loss.variable_weight, config.parallel.layout) == (weights, layout), texts


def test_nothing_is_suggested_that_would_be_refused() -> None:
    for text in ("a b=c=d", "seed=[1", "model=a=b", "optimizer.betas=[0.9", "nope=[1"):
        with pytest.raises(UserError) as caught:
            parse_overrides([text])
        assert "write" not in str(caught.value), text


def test_a_printed_argument_is_read_as_it_was() -> None:
    for path in (
        *("/data/runs/a", "../a.b", "run dir", "lr=1,2", "[x]", "a$b{c}", "größer", "1e3", 'a"b'),
        "",
    ):
        (word,) = shlex.split(shell_argument("run.dir", path))
        parsed = try_parse(word)
        assert parsed is not None, path
        assert not parsed.is_sweep_override(), path
        assert parsed.value() == path
