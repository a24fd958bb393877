"""What a row of a job costs beyond the engine, with and without a checkpoint, and that memory stays flat.

usage: python -m tests.benchmarks.frames_overhead [ROWS] [ROUNDS]

The same requests go through the fake backend in three ways, in turn: submitted one by one by the cheapest loop there
is, as a job, and as a job with a checkpoint. All prompts differ. Prints JSON: medians in microseconds a row, by the
clock and of CPU time (which other work on the machine disturbs less), and memory in the four quarters of a job. Exit
status 1 when a bound is missed.
"""

import gc
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig
from mlx_nb.backends.fake import fake_backend, text_tokens
from mlx_nb.frames.job import Ask, Job, Outcome
from mlx_nb.frames.store import Store

from .report import report

PARAMS = SamplingParams(max_tokens=4, temperature=0)
ANSWER = text_tokens("yes")
BOUND_US = 60.0
BOUND_STORED_US = 120.0
BOUND_GROWTH = 16.0
"""MiB between the first and the last quarter: one digest and one position a row."""


def prompts(rows: int) -> Iterator[str]:
    """Yield prompts, each another one."""
    for row in range(rows):
        yield f"Is {row} a number? Answer yes or no."


def directly(core: EngineCore, rows: int) -> None:
    """Submit, two batches ahead, and take what is done."""
    window = 2 * core.config.scheduler_config.max_running
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    live = 0
    for prompt in prompts(rows):
        if live == window:
            done.get()
            live -= 1
        core.submit(prompt, PARAMS, preview=prompt, keep=False, on_done=done.put)
        live += 1
    for _ in range(live):
        done.get()


def as_job(core: EngineCore, rows: int, **options: object) -> None:
    """Run a job whose outcomes nobody keeps."""
    outcome = Outcome("stop")
    Job(
        core,
        prompts(rows),
        lambda prompt: Ask(prompt, prompt, PARAMS),
        lambda position, outcome: None,
        recall=lambda position: outcome,
        total=rows,
        **options,
    ).run()


def with_checkpoint(core: EngineCore, rows: int) -> None:
    """Run a job into a new checkpoint."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "rows.db") as store:
        as_job(core, rows, store=store)
        assert store.counts() == (rows, 0)


def resident_mib() -> float:
    """Return the memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def memory_by_quarter(core: EngineCore, rows: int) -> list[float]:
    """Return the most MiB that were resident in each quarter of a job."""
    most = [0.0] * 4
    outcome = Outcome("stop")
    ended = 0

    def record(position: int, outcome: Outcome) -> None:
        nonlocal ended
        if ended % 500 == 0:
            quarter = ended * 4 // rows
            most[quarter] = max(most[quarter], resident_mib())
        ended += 1

    gc.collect()
    Job(
        core,
        prompts(rows),
        lambda prompt: Ask(prompt, prompt, PARAMS),
        record,
        recall=lambda position: outcome,
        total=rows,
    ).run()
    return most


def main(rows: int = 100_000, rounds: int = 3) -> int:
    config = EngineConfig(scheduler_config=SchedulerConfig(enable_prefix_cache=False))
    core = EngineCore(None, None, config, backend=fake_backend(lambda request: ANSWER))
    core.launch()
    core.wait_ready()
    ways: list[Callable[[EngineCore, int], None]] = [directly, as_job, with_checkpoint]
    took: dict[str, list[float]] = {way.__name__: [] for way in ways}
    worked: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for way in ways:
        way(core, min(rows, 2000))  # warm up
    for _ in range(rounds):
        for way in ways:
            began, working = time.perf_counter(), time.process_time()
            way(core, rows)
            took[way.__name__].append((time.perf_counter() - began) / rows * 1e6)
            worked[way.__name__].append((time.process_time() - working) / rows * 1e6)
    quarters = memory_by_quarter(core, rows)
    core.close()
    medians = {name: statistics.median(values) for name, values in took.items()}
    job = medians["as_job"] - medians["directly"]
    stored = medians["with_checkpoint"] - medians["directly"]
    report(
        rows=rows,
        us_a_row=medians,
        cpu_us_a_row={name: statistics.median(values) for name, values in worked.items()},
        rounds=took,
        us_beyond_the_engine=round(job, 1),
        us_beyond_the_engine_with_checkpoint=round(stored, 1),
        resident_mib_by_quarter=[round(mib, 1) for mib in quarters],
    )
    return int(job > BOUND_US or stored > BOUND_STORED_US or quarters[3] - quarters[0] > BOUND_GROWTH)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
