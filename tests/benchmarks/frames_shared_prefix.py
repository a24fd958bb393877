"""Rows with a long instruction in common: a job against `mlx_lm.batch_generate`, and duplicates against none.

usage: python -m tests.benchmarks.frames_shared_prefix [MODEL] [ROUNDS]

64 prompts of a shared 460-token instruction and a 20-token tail, 16 new tokens each, greedily; both ways get the same
tokens and the same model, in turn, and the engine begins each round with an empty prefix cache. Then 2,000 short rows
on the fake backend at a fixed time a step, once all different and once each of them twice. Prints JSON: seconds of
every round, rows a second, and whether the texts are equal. Exit status 1 when a bound is missed or a text differs.
"""

import random
import statistics
import sys
import time
from typing import Any

from mlx_nb.backends import cpu_blas

BLAS = cpu_blas.prepare()

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig
from mlx_nb.backends import loader, sources
from mlx_nb.backends.fake import fake_backend, text_tokens
from mlx_nb.frames.job import Ask, Job, Outcome

from .report import report

ROWS, SHARED, TAIL, NEW = 64, 460, 20, 16
PARAMS = SamplingParams(max_tokens=NEW, temperature=0)
INSTRUCTION = (
    "You read what customers write about a shop that sells kitchen goods, and say in one short sentence what the "
    "shop should do about it. Be friendly and precise. Name the article if the customer names one. If the customer "
    "is content, thank them; if something broke, offer to replace it; if it came late, say that you are sorry. "
)
WORDS = (
    *(
        "kettle",
        "lid",
        "pan",
        "handle",
        "spoon",
        "arrived",
        "broken",
        "yesterday",
        "nice",
        "late",
        "again",
        "colour",
    ),
    *(
        "blue",
        "wrong",
        "box",
        "friendly",
        "thanks",
        "refund",
        "please",
        "sharp",
        "knife",
        "table",
        "small",
        "large",
    ),
    *("heavy", "glass", "cracked", "fast", "delivery", "twice", "order", "missing", "warm"),
)
BOUND_SHARED, BOUND_DUPLICATES = 4.5, 1.8


def prompts(tokenizer: Any) -> list[list[int]]:
    """Return the rows' tokens."""
    instruction = tokenizer.encode(INSTRUCTION * 8)[:SHARED]
    tails = [" ".join(random.Random(row).choices(WORDS, k=2 * TAIL)) for row in range(ROWS)]
    rows = [instruction + tokenizer.encode(f"\n{tail}")[-TAIL:] for tail in tails]
    assert {len(row) for row in rows} == {SHARED + TAIL}
    assert len(set(map(tuple, rows))) == ROWS
    return rows


def as_job(core: EngineCore, rows: list[list[int]]) -> list[str | None]:
    """Return the texts of a job."""
    outcomes: dict[int, Outcome] = {}
    ask = lambda tokens: Ask(tokens, "a review", PARAMS)  # noqa: E731
    Job(core, rows, ask, outcomes.__setitem__, recall=outcomes.__getitem__, total=len(rows)).run()
    return [outcomes[row].text for row in range(len(rows))]


def by_mlx_lm(model: Any, tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """Return the texts of the baseline."""
    from mlx_lm import batch_generate

    texts: list[str] = batch_generate(model, tokenizer, rows, max_tokens=NEW).texts
    return texts


def shared_prefix(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of the first comparison."""
    loaded = loader.load(sources.fetch(sources.resolve(name)))
    rows = prompts(loaded.tokenizer)
    core = EngineCore(loaded.model, loaded.tokenizer)
    core.launch()
    as_job(core, [row[-30:] for row in rows[:2]])
    ours: list[float] = []
    theirs: list[float] = []
    equal = []
    for _ in range(rounds):
        core.clear_prefix_cache()
        began = time.perf_counter()
        texts = as_job(core, rows)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        reference = by_mlx_lm(loaded.model, loaded.tokenizer, rows)
        theirs.append(time.perf_counter() - began)
        equal.append(sum(map(str.__eq__, map(str, texts), reference)))
    core.close()
    return {
        "job_s": ours,
        "mlx_lm_s": theirs,
        "job_rows_per_second": ROWS / statistics.median(ours),
        "mlx_lm_rows_per_second": ROWS / statistics.median(theirs),
        "times_as_fast": statistics.median(theirs) / statistics.median(ours),
        "equal_texts": equal,
    }


def duplicates(rounds: int, rows: int = 2000, step_s: float = 0.004) -> dict[str, Any]:
    """Return the figures of the second comparison: half of the rows are like the other half, in mixed order."""
    config = EngineConfig(scheduler_config=SchedulerConfig(enable_prefix_cache=False))
    core = EngineCore(
        None, None, config, backend=fake_backend(lambda request: text_tokens("yes, it is"), step_s=step_s)
    )
    core.launch()
    core.wait_ready()
    different = [text_tokens(f"{row} is a number") for row in range(rows)]
    twice = [different[row * 7 % rows // 2] for row in range(rows)]
    assert len(set(map(tuple, twice))) == rows // 2
    seconds: dict[str, list[float]] = {"different": [], "each_twice": []}
    for _ in range(rounds):
        for label, some in (("different", different), ("each_twice", twice)):
            began = time.perf_counter()
            as_job(core, some)
            seconds[label].append(time.perf_counter() - began)
    core.close()
    medians = {label: statistics.median(took) for label, took in seconds.items()}
    return {"rows": rows, "seconds": seconds, "times_as_fast": medians["different"] / medians["each_twice"]}


def main(model: str = "demo", rounds: str = "3") -> int:
    shared, doubled = shared_prefix(model, int(rounds)), duplicates(int(rounds))
    report(model=model, blas=str(BLAS), shared_prefix=shared, duplicates=doubled)
    fast = shared["times_as_fast"] >= BOUND_SHARED and doubled["times_as_fast"] >= BOUND_DUPLICATES
    return int(not (fast and set(shared["equal_texts"]) == {ROWS}))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
