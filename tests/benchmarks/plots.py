"""A picture of each workload that has rounds, where Matplotlib is installed."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .table import Row


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the ratios of each figure of each workload as dots with their quartiles; return the files."""
    if find_spec("matplotlib") is None:
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn = []
    with_ratio = [row for row in rows if row.ratio is not None]
    for workload, figure in sorted({(row.workload, row.figure) for row in with_ratio}):
        mine = [row for row in with_ratio if (row.workload, row.figure) == (workload, figure)]
        picture, axes = plt.subplots(figsize=(7, 0.8 + 0.28 * len(mine)), layout="constrained")
        for place, row in enumerate(reversed(mine)):
            colour = {"": "0.5", "met": "tab:green"}.get(row.verdict, "tab:red")
            axes.plot([row.low, row.high], [place, place], color=colour)
            axes.plot(row.ratio, place, "o", color=colour)
        axes.axvline(1, color="0.8", zorder=0)
        axes.set_yticks(
            range(len(mine)), [f"{row.case} {row.contender} / {row.against}" for row in reversed(mine)]
        )
        axes.set_title(f"{workload}: {figure}")
        path = folder / f"{workload}_{figure.replace('/', '_per_').replace(' ', '_')}.png"
        picture.savefig(path, dpi=120)
        plt.close(picture)
        drawn.append(path)
    return drawn
