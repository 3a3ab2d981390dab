"""The page of scores at stations: tables, maps of errors and, of ensembles, rank histograms."""

from typing import NamedTuple, final

import numpy as np

from credit_dp.data.grid import GLOBAL
from credit_dp.evaluation.drawing import draw_or_warn
from credit_dp.evaluation.figure_style import figure_style
from credit_dp.evaluation.map_plots import draw_error_maps
from credit_dp.evaluation.pages import render_page
from credit_dp.evaluation.score_folder import figure_data_uri, table_lead_indices
from credit_dp.evaluation.score_plots import add_legend, create_panels, draw_rank_histogram
from credit_dp.evaluation.scorecard import headlines, three_digits
from credit_dp.evaluation.station_scores import StationScores
from credit_dp.plain_text import superscript

# Of tables: score, index of the source, heading.
COLUMNS = (
    ("rmse", 0, "RMSE"),
    ("rmse", 1, "RMSE persist."),
    ("bias", 0, "BIAS"),
    ("observations", 0, "observations"),
    ("observations", 1, "of persist."),
)
HEADINGS = ("unit", *(heading for _, _, heading in COLUMNS))


@final
class StationTable(NamedTuple):
    """The scores of a lead time and a region; a row has the variable, then `HEADINGS`."""

    title: str
    rows: list[tuple[str, ...]]


def station_tables(scores: StationScores) -> list[StationTable]:
    """Return the scores of a few lead times, over all stations, then those of each region."""
    tables = []
    for region in scores.regions:
        values = {name: scores.of_region(name, region) for name in scores.sums}
        for lead in table_lead_indices(scores.hours):
            rows = [
                (
                    name,
                    superscript(scores.units[name]) or "-",
                    *(_cell(values[name][score][s, lead]) for score, s, _ in COLUMNS),
                )
                for name in scores.sums
            ]
            title = f"{scores.hours[lead]} h" + ("" if region == GLOBAL else f", {region}")
            tables.append(StationTable(title, rows))
    return tables


def _cell(value: float) -> str:
    return three_digits(value) if np.isfinite(value) else "-"


def station_page(scores: StationScores) -> str:
    """Return the page as HTML text."""
    leads = table_lead_indices(scores.hours)
    plotted = plotted_names(scores)
    return render_page(
        "stations.html",
        title=f"Scores of {scores.forecast} at stations",
        metadata={
            "Forecast": scores.forecast,
            "Members": str(scores.members),
            "Observations": scores.observations.where,
            "Compared": scores.coverage,
        },
        notes=scores.notes,
        plotted=len(plotted),
        count=len(scores.sums),
        headings=HEADINGS,
        tables=station_tables(scores),
        maps=[
            (title, draw_or_warn(title, station_map_image, scores, name, lead))
            for name in plotted
            for lead in dict.fromkeys((leads[0], leads[-1]))
            if scores.of_region(name, GLOBAL)["observations"][0, lead]
            for title in [f"Errors of {name.replace('_', ' ')} at {scores.hours[lead]} h"]
        ],
        ensemble=scores.members > 1,
        ranks=draw_or_warn("rank histograms", station_ranks_image, scores)
        if scores.members > 1
        else None,
    )


def plotted_names(scores: StationScores) -> list[str]:
    """Return the channels with maps and rank histograms, as in a scorecard."""
    names = [name for name in scores.sums if scores.of_region(name, GLOBAL)["observations"].any()]
    return [names[index] for index in headlines(names)]


@figure_style()
def station_map_image(scores: StationScores, name: str, lead: int) -> str:
    """Return maps of root-mean-square and mean error at each station, as `data:` URI."""
    at_stations, seen = scores.sums[name].of_stations(), scores.observations
    rmse, bias = (at_stations[score][0, lead] for score in ("rmse", "bias"))
    places = seen.latitude, seen.longitude
    unit, variable = scores.units[name], scores.channels[name].variable
    figure = draw_error_maps(scores.grid, rmse, bias, unit, variable=variable, places=places)
    return figure_data_uri(figure, "png")


@figure_style()
def station_ranks_image(scores: StationScores) -> str:
    """Return rank histograms of a few lead times, a panel for each variable, as `data:` URI."""
    shown = table_lead_indices(scores.hours)
    later = [lead for lead in shown if scores.hours[lead] > 0] or shown
    leads = {f"{scores.hours[lead]} h": lead for lead in later}
    names = plotted_names(scores)
    figure, panels = create_panels(len(names), labels=[*leads])
    for axes, name in zip(panels, names, strict=False):  # the last row may have empty ones
        frequencies = scores.rank_frequencies(name)
        histograms = {
            label: frequencies[lead]
            for label, lead in leads.items()
            if np.isfinite(frequencies[lead]).all()
        }
        draw_rank_histogram(axes, histograms, name, of="observation")
    add_legend(figure, panels[: len(names)])
    return figure_data_uri(figure, "svg")
