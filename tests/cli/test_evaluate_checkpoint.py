"""`credit-dp evaluate checkpoint=`: its words, its meshes, and one line for each mistake."""

from pathlib import Path

import numpy as np
import pandas
import pytest

from tests.cli.invocation import answer
from tests.forecast.runs import train

EVENTS = ('events={2m_temperature: [">280"]}', "fss=[3000]")
WORDS = ("dates=[2000-01-02,2000-01-04,24h]", "hours=[6,12]", "device=cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    return Path(train(tmp_path_factory.mktemp("trained")).run.dir)


@pytest.fixture
def evaluate(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDIT_DP_CACHE", str(tmp_path / "cache"))

    def command(*words: str, command: str = "evaluate") -> tuple[int, str, str]:
        with monkeypatch.context() as inner:
            return answer(inner, command, f"checkpoint={run}", *words, program="credit-dp")

    return command


def numbers(folder: Path, file: str = "scores.csv") -> pandas.Series:
    """Return the scores of a folder by all that names them."""
    table = pandas.read_csv(folder / file)
    return table.set_index([name for name in table if name != "value"])["value"]


def test_scores_are_those_of_the_stored_forecast_on_any_mesh(evaluate, tmp_path: Path) -> None:
    code, out, _ = evaluate(*WORDS, *EVENTS, "out=live")
    assert code == 0
    assert "3 initial times" in out
    assert out.endswith("scorecard.html\n")
    code, _, _ = evaluate(*WORDS, *EVENTS, "out=mesh", "parallel.domain=2", "parallel.data=2")
    assert code == 0
    words = ("init=2000-01-02/2000-01-04/24h", "lead=12h", "device=cpu", "out=f.zarr")
    assert evaluate(*words, command="forecast")[0] == 0
    assert not list(tmp_path.glob("*.partial"))
    with pytest.MonkeyPatch.context() as inner:
        words = ("forecast=f.zarr", "out=stored", "hours=[6,12]", *EVENTS)
        assert answer(inner, "evaluate", *words, program="credit-dp")[0] == 0
    for file, tolerance in {"scores.csv": 1e-6, "events.csv": 1e-12}.items():
        stored = numbers(tmp_path / "stored", file)
        for folder in ("live", "mesh"):
            found = numbers(tmp_path / folder, file)
            assert found.index.equals(stored.index)
            np.testing.assert_allclose(found, stored, rtol=tolerance, atol=1e-9)


REFUSED = {
    "out=": "out: needs the folder to write",
    "forecast=f.zarr": "forecast: has no effect together with checkpoint=. Leave one out.",
    "stations=s.csv": "stations: has no effect together with checkpoint=. Leave one out.",
    "dates=[2000-01-02]": "dates: needs [first, last] in ISO format",
    "dates=[2000-01-02,2000-01-03,5]": "dates: needs whole hours or days, like 240h or 10d, got",
    "dates=[1900-01-02,1900-01-03]": "dates: needs a state at 1900-01-02T00:00",
    "hours=[7]": "hours: needs a multiple of the model's step of 6h, got 7h. Change hours.",
    "members=2": "members: 2 forecasts from the same state would be the same.",
    "truth=/nowhere": "/nowhere: no such zarr store. Set truth to one that exists.",
    "regions=[moon]": "regions: needs one of global, tropics",
    "foo=1": "credit-dp evaluate: needs keys like forecast, checkpoint",
    "variables=[moon]": "no forecast of moon",
}


@pytest.mark.parametrize("word", REFUSED)
def test_refused_in_one_line_and_nothing_written(evaluate, tmp_path: Path, word: str) -> None:
    code, _, error = evaluate(*WORDS, "out=scores", word)
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert REFUSED[word] in error
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


def test_members_need_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, error = answer(monkeypatch, "evaluate", "forecast=f", "members=3", program="credit-dp")
    assert (code, error) == (
        2, "error: members: has an effect with checkpoint= only. Leave it out.\n"
    )  # fmt: skip
