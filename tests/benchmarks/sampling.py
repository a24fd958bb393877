"""What sampling costs: decoding a batch whose rows all have parameters of their own, against greedy decoding.

usage: python -m tests.benchmarks.sampling [MODEL] [ROUNDS] [ROWS] [TOKENS]

All in one process and in turn, each round in another order. "top_k" rows have temperature, top-k up to 64, top-p, a
repetition penalty and a seed, all different; "top_p" rows the same without top-k; "top_p_only" rows have no penalty
either, like the default of `SamplingParams`. Prints JSON: tokens a second, the medians over rounds of the ratio to
greedy, and whether a seeded answer is the same alone. Exit status 1 when a bound is missed.
"""

import statistics
import sys
import time
from typing import Any

from mlx_nb.backends import cpu_blas

BLAS = cpu_blas.prepare()

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig
from mlx_nb.backends.pretrained import Pretrained

from .report import report

BOUNDS = {"top_k": 0.85, "top_p": 0.65, "top_p_only": 0.65}


def params(kind: str, row: int, tokens: int) -> SamplingParams:
    """Return one row's parameters, no two rows alike."""
    common = SamplingParams(max_tokens=tokens, ignore_eos=True)
    if kind.startswith("greedy"):
        return common.but(temperature=0.0)
    hot = common.but(temperature=0.5 + 0.02 * row, top_p=0.8 + 0.005 * row, seed=row)
    if kind == "top_p_only":
        return hot
    hot = hot.but(repetition_penalty=1.05 + 0.01 * row)
    return hot.but(top_k=10 + row % 55) if kind == "top_k" else hot


def measure(name: str, rounds: int, rows: int, tokens: int) -> dict[str, Any]:
    """Run all kinds in turn."""
    factory = Pretrained(name)
    scheduler = SchedulerConfig(
        enable_prefix_cache=False, completion_batch_size=rows, prefill_batch_size=min(rows, 32)
    )
    core = EngineCore(None, None, EngineConfig(model_name=name, scheduler_config=scheduler), backend=factory)
    core.launch()
    core.wait_ready()
    prompts = [f"Once upon a time, in town number {row}," for row in range(rows)]
    kinds = ("greedy", "greedy_again", *BOUNDS)
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    texts: dict[str, str] = {}
    for turn in range(rounds + 1):
        for kind in (*kinds[turn % len(kinds) :], *kinds[: turn % len(kinds)]):
            asked = [params(kind, row, tokens) for row in range(rows)]
            outputs = core.generate_batch_sync(prompts, asked)
            first = max(output.timings["ttft_s"] for output in outputs)
            total = max(output.timings["total_s"] for output in outputs)
            texts[kind] = outputs[rows // 2].output_text
            if turn:  # the first warms up
                speeds[kind].append(rows * (tokens - 1) / (total - first))
    alone = {
        kind: core.generate_sync(prompts[rows // 2], params(kind, rows // 2, tokens)).output_text
        for kind in BOUNDS
    }
    core.close()
    return {
        kind: {
            "tokens_per_s": round(statistics.median(speeds[kind]), 1),
            "ratio": round(
                statistics.median(a / b for a, b in zip(speeds[kind], speeds["greedy"], strict=True)), 3
            ),
            **({"same_alone": alone[kind] == texts[kind]} if kind in alone else {}),
        }
        for kind in kinds
    }


def main() -> int:
    """Measure and report."""
    name = sys.argv[1] if len(sys.argv) > 1 else "demo"
    rounds, rows, tokens = (int(word) for word in [*sys.argv[2:], *("5", "32", "32")[len(sys.argv[2:]) :]])
    began = time.perf_counter()
    figures = measure(name, rounds, rows, tokens)
    missed = [kind for kind, at_least in BOUNDS.items() if figures[kind]["ratio"] < at_least]
    missed += [kind for kind in BOUNDS if not figures[kind]["same_alone"]]
    report(
        model=name,
        blas=str(BLAS),
        rounds=rounds,
        rows=rows,
        tokens=tokens,
        bounds=BOUNDS,
        missed=missed,
        kinds=figures,
        seconds=round(time.perf_counter() - began, 1),
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
