"""Figures against their bars, as rows of a table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FLOOR, AGAIN = "floor", "floor_again"
Series = Mapping[str, Sequence[float]]
"""A figure of each contender, a value a round."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a contender must reach: a ratio to another one, or a value if there is none.

    Attributes
    ----------
    at_least, at_most : float, optional
        One of them.
    """

    contender: str
    against: str | None = FLOOR
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"

    def missed_by(self, value: float) -> float:
        """Return how far a value is on the wrong side; 0 and less is met."""
        return self.at_least - value if self.at_least is not None else value - (self.at_most or 0)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes
    ----------
    value : float
        Median over rounds.
    ratio, low, high : float, optional
        To the same round of another contender: median, and the quartiles.
    verdict : str
        "met", "missed", or "missed, within the noise": by no more than the floor differs from itself.
    """

    workload: str
    case: str
    contender: str
    figure: str
    value: float
    rounds: int = 1
    against: str | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    bar: str = ""
    verdict: str = ""

    def plain(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return asdict(self)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first, the median and the third."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def ratios(series: Series, contender: str, against: str) -> list[float]:
    """Return the ratios of the rounds that both were in."""
    pairs = zip(series.get(contender, ()), series.get(against, ()), strict=False)
    return [one / two for one, two in pairs if two]


def noise(series: Series) -> float:
    """Return half of what lies between the quartiles of the floor against itself."""
    own = ratios(series, AGAIN, FLOOR)
    if len(own) < 3:
        return 0.0
    first, _, third = quartiles(own)
    return (third - first) / 2


def compare(
    workload: str,
    case: str,
    figure: str,
    series: Series,
    bars: Sequence[Bar] = (),
    baseline: str = FLOOR,
) -> list[Row]:
    """Return a row for each contender, against the baseline, and one for each bar against another."""
    rows = []
    for contender, values in series.items():
        if not values:
            continue
        mine = [bar for bar in bars if bar.contender == contender and bar.against in {baseline, None}]
        rows.append(_row(workload, case, figure, series, contender, baseline, mine[0] if mine else None))
    for bar in bars:
        known = series.get(bar.contender) and bar.against and series.get(bar.against)
        if known and bar.against != baseline:
            rows.append(_row(workload, case, figure, series, bar.contender, bar.against, bar))
    return rows


def _row(
    workload: str,
    case: str,
    figure: str,
    series: Series,
    contender: str,
    against: str | None,
    bar: Bar | None,
) -> Row:
    values = series[contender]
    value = statistics.median(values)
    if bar is not None and bar.against is None:
        verdict = _verdict(bar, value, 0)
        return Row(workload, case, contender, figure, value, len(values), bar=str(bar), verdict=verdict)
    own = ratios(series, contender, against) if against and against != contender else []
    if not own:
        return Row(workload, case, contender, figure, value, len(values))
    low, ratio, high = quartiles(own)
    verdict = _verdict(bar, ratio, noise(series)) if bar else ""
    return Row(
        workload, case, contender, figure, value, len(own), against, ratio, low, high,
        str(bar) if bar else "", verdict,
    )  # fmt: skip


def _verdict(bar: Bar, value: float, noise: float) -> str:
    missed = bar.missed_by(value)
    if missed <= 0:
        return "met"
    return "missed, within the noise" if missed <= noise else "missed"


def single(
    workload: str, case: str, contender: str, figure: str, value: float, bar: Bar | None = None
) -> Row:
    """Return the row of one value that stands for itself."""
    if bar is None:
        return Row(workload, case, contender, figure, value)
    return Row(workload, case, contender, figure, value, bar=str(bar), verdict=_verdict(bar, value, 0))


HEADS = ("work", "case", "contender", "figure", "median", "ratio", "quartiles", "to", "bar", "verdict")


def markdown(rows: Sequence[Row]) -> str:
    """Return the table, aligned for people who read it as it is."""
    cells = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    spread = "" if row.low is None or row.rounds < 2 else f"{row.low:.2f} to {row.high:.2f}, n={row.rounds}"
    return (
        row.workload, row.case, row.contender, row.figure, number(row.value), ratio, spread, row.against or "",
        row.bar, row.verdict,
    )  # fmt: skip


def number(value: float) -> str:
    """Return three or four digits of it."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 4}f}"
