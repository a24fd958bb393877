"""What the engine adds to each decode step of a tiny model, over a bare loop around mlx-lm's BatchGenerator.

usage: python -m tests.benchmarks.overhead [ROUNDS] [TOKENS]

All in one process and in turn, each round in another order: the bare loop, the loop again (what differs between the
two is noise), the engine with one caller for all answers, the engine with an asyncio task streaming each answer, and
both with a temperature. Prints JSON: microseconds a step, and the median over rounds of what is more than the loop's.
Exit status 1 when the engine adds more than its bound.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from mlx_nb.backends import cpu_blas

cpu_blas.prepare()

from mlx_lm.generate import BatchGenerator

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig
from tests.models import tiny

from .report import report

ROWS = (1, 8, 32)
PROMPT = list(range(20, 36))


def bound(rows: int) -> float:
    """Return the microseconds that a step may cost more than the loop's."""
    return 120 + 12 * rows


def bare(rows: int, tokens: int) -> float:
    """Return the seconds that the loop takes."""
    model, tokenizer = tiny()
    began = time.perf_counter()
    generator = BatchGenerator(model, completion_batch_size=32, prefill_batch_size=32)
    generator.insert([PROMPT] * rows, max_tokens=[tokens] * rows)
    left = rows
    answers: dict[int, list[int]] = {}
    while left:
        for response in generator.next()[1]:
            answers.setdefault(response.uid, []).append(response.token)
            left -= response.finish_reason is not None
    for answer in answers.values():
        tokenizer.decode(answer)
    generator.close()
    return time.perf_counter() - began


def whole(core: EngineCore, params: SamplingParams, rows: int) -> float:
    """Return the seconds that one call for all answers takes."""
    began = time.perf_counter()
    core.generate_batch_sync([PROMPT] * rows, params)
    return time.perf_counter() - began


async def _streams(core: EngineCore, params: SamplingParams, rows: int) -> float:
    async def consume(request_id: str) -> None:
        async for _ in core.stream_outputs(request_id):
            pass

    began = time.perf_counter()
    ids = [await core.add_request(PROMPT, params) for _ in range(rows)]
    await asyncio.gather(*map(consume, ids))
    return time.perf_counter() - began


def streamed(core: EngineCore, params: SamplingParams, rows: int) -> float:
    """Return the seconds that answers take which tasks of a loop stream, one each."""
    return asyncio.run(_streams(core, params, rows))


def measure(rounds: int, tokens: int) -> dict[str, Any]:
    """Run all contenders in turn."""
    scheduler = SchedulerConfig(prefill_batch_size=32, enable_prefix_cache=False)
    core = EngineCore(*tiny(), EngineConfig(model_name="tiny", scheduler_config=scheduler))
    core.launch()
    core.wait_ready()
    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    figures: dict[str, Any] = {}
    for rows in ROWS:
        contenders: dict[str, Callable[[], float]] = {
            "loop": lambda rows=rows: bare(rows, tokens),  # type: ignore[misc]
            "loop_again": lambda rows=rows: bare(rows, tokens),  # type: ignore[misc]
            "engine": lambda rows=rows: whole(core, greedy, rows),  # type: ignore[misc]
            "engine_streamed": lambda rows=rows: streamed(core, greedy, rows),  # type: ignore[misc]
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            names = list(contenders)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = contenders[name]()
                if turn:  # the first warms up
                    times[name].append(1e6 * seconds / tokens)
        added = {
            name: round(statistics.median(a - b for a, b in zip(times[name], times["loop"], strict=True)))
            for name in times
            if name != "loop"
        }
        figures[str(rows)] = {
            "us_a_step": {name: round(statistics.median(each)) for name, each in times.items()},
            "us_a_step_min": {name: round(min(each)) for name, each in times.items()},
            "us_added": added,
            "us_added_min": {name: round(min(times[name]) - min(times["loop"])) for name in added},
            "bound": bound(rows),
        }
    core.close()
    return figures


def main() -> int:
    """Measure and report."""
    rounds, tokens = (int(word) for word in [*sys.argv[1:], "12", "200"][:2])
    figures = measure(rounds, tokens)
    missed = [rows for rows, row in figures.items() if row["us_added"]["engine"] > row["bound"]]
    report(rounds=rounds, tokens=tokens, missed=missed, rows=figures)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
