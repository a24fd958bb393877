"""How fast an engine decodes while the cell computes in pure Python, and what that costs the cell.

usage: python -m tests.benchmarks.spinning [ROUNDS] [SECONDS] [ROWS] [SUBJECT]

A tiny model, or a subject of the suite, decodes on the engine's thread, its answers longer than a situation lasts.
Each round, in turn: the main thread sleeps; it spins; it spins with Python's own switch interval; and it spins while
the engine is idle. Prints JSON: tokens a second and loops of the cell a second, as medians over rounds. `kept` is the
decode speed beside a spinning cell against a sleeping one; `cell_loses` is what the shorter switch interval takes
from the cell beyond what it gives up with Python's own; `cell_loses_to_engine` what it takes that the engine decodes
at all. Exit status 1 when a bound is missed.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from mlx_nb.backends import cpu_blas

cpu_blas.prepare()

from mlx_nb import EngineConfig, EngineCore, SamplingParams
from tests.models import tiny

from . import subjects
from .report import report

KEPT = 0.35
CELL_LOSES = 0.03
PYTHONS_INTERVAL_S = 0.005


def spin(seconds: float) -> float:
    """Return loops a second of a cell that computes."""
    loops, number = 0, 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        for _ in range(1000):
            number = (number * 3 + 1) % 65_521
        loops += 1
    return loops / spent


def sleep(seconds: float) -> float:
    """Return 0: the cell does nothing."""
    time.sleep(seconds)
    return 0.0


def measure(rounds: int, seconds: float, rows: int, subject: str | None) -> dict[str, Any]:
    """Run all situations in turn."""
    core = EngineCore(*(subjects.load(Path(subject)) if subject else tiny()), EngineConfig(model_name="it"))
    core.launch()
    core.wait_ready()
    params = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
    ways = {
        "idle": (sleep, True),
        "spinning": (spin, True),
        "pythons_interval": (spin, True),
        "alone": (spin, False),
    }
    tokens: dict[str, list[float]] = {name: [] for name in ways}
    loops: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cell, busy = ways[name]
            if busy:
                for _ in range(rows):
                    core.submit([20, 21, 22], params, on_done=lambda _: None)
                while core.get_stats()["num_running"] < rows:
                    time.sleep(0.001)
            before = sys.getswitchinterval()
            if name == "pythons_interval":
                sys.setswitchinterval(PYTHONS_INTERVAL_S)
            began, made = time.perf_counter(), core.get_stats()["total_completion_tokens"]
            speed = cell(seconds)
            spent = time.perf_counter() - began
            made = core.get_stats()["total_completion_tokens"] - made
            sys.setswitchinterval(before)
            core.abort_all()
            while core.get_stats()["num_running"]:
                time.sleep(0.001)
            if turn:  # the first warms up
                tokens[name].append(made / spent)
                loops[name].append(speed)
    core.close()

    def ratio(values: dict[str, list[float]], one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(values[one], values[other], strict=True)), 3)

    return {
        "tokens_per_s": {name: round(statistics.median(each)) for name, each in tokens.items()},
        "loops_per_s": {name: round(statistics.median(each)) for name, each in loops.items()},
        "kept": ratio(tokens, "spinning", "idle"),
        "kept_with_pythons_interval": ratio(tokens, "pythons_interval", "idle"),
        "cell_loses": round(1 - ratio(loops, "spinning", "pythons_interval"), 3),
        "cell_loses_to_engine": round(1 - ratio(loops, "spinning", "alone"), 3),
    }


def main() -> int:
    """Measure and report."""
    rounds, rows = (int(word) for word in [*sys.argv[1:2], *sys.argv[3:4], "6", "1"][:2])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.5
    figures = measure(rounds, seconds, rows, sys.argv[4] if len(sys.argv) > 4 else None)
    missed = [] if figures["kept"] >= KEPT else ["kept"]
    missed += [] if figures["cell_loses"] < CELL_LOSES else ["cell_loses"]
    report(
        rounds=rounds,
        seconds=seconds,
        rows=rows,
        bounds={"kept": KEPT, "cell_loses": CELL_LOSES},
        missed=missed,
        **figures,
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
