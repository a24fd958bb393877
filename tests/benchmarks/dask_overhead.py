"""What a partition costs on a Dask cluster, beyond what its rows cost on one engine.

usage: python -m tests.benchmarks.dask_overhead [ROWS] [ROUNDS]

A few rows are asked for no tokens at all, so that only what is around the model takes time: on an engine of this
process, and on two worker processes of this machine, in few partitions and in many. Prints JSON: seconds of a call
(medians), and milliseconds that one more partition adds. Exit status 1 when the bound is missed.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from mlx_nb.backends import cpu_blas

cpu_blas.prepare()

import pandas as pd

import mlx_nb
from tests.benchmarks.report import report

BOUND_MS = 50.0
FEW, MANY = 2, 42


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(rows: int, rounds: int) -> int:
    from distributed import Client, LocalCluster

    sys.path.insert(0, "tests")
    from models import tiny_folder

    frame = pd.DataFrame({"n": range(rows)})

    def ask(**options: Any) -> None:
        answers = mlx_nb.generate_frame(
            frame, "Is {{ n }} a number?", max_tokens=0, progress=False, **options
        )
        assert len(answers) == rows

    mlx_nb.start(tiny_folder(), name="local")
    took: dict[str, list[float]] = {"local": [], "few": [], "many": []}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        start = seconds(lambda: mlx_nb.start_workers(client, tiny_folder()))
        for _ in range(rounds + 1):
            took["local"].append(seconds(lambda: ask(engine="local")))
            took["few"].append(seconds(lambda: ask(client=client, partitions=FEW)))
            took["many"].append(seconds(lambda: ask(client=client, partitions=MANY)))
    mlx_nb.stop("local")
    calls = {name: statistics.median(times[1:]) for name, times in took.items()}
    each = (calls["many"] - calls["few"]) / (MANY - FEW) * 1e3
    report(
        benchmark="dask_overhead",
        rows=rows,
        rounds=rounds,
        start_workers_s=round(start, 2),
        call_s={
            "local": calls["local"],
            f"{FEW} partitions": calls["few"],
            f"{MANY} partitions": calls["many"],
        },
        partition_ms=round(each, 2),
        bound_ms=BOUND_MS,
    )
    return int(each > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) if len(sys.argv) > 2 else main(84, 9))
