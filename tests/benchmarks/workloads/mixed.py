"""Four answers that stream while a prompt of 4,000 tokens is prefilled: the gaps between their tokens.

A gap is compared to the time of one prefill chunk of the configured size, which is its share of the time that such a
prompt takes alone in the same engine. ``ours@256`` has that size; ``ours`` the usual upper bound of 2,048, which the
engine doesn't use up on a slow machine.
"""

import statistics

from ..bench import Options, Outcome, contest
from ..link import Entry
from ..table import FLOOR, Bar, compare, single
from ..work import Ask, first_tokens, gaps, percentile

LONG, STREAMS, LATER = 4000, 4, 0.5
ENDLESS = 1500
"""Tokens of an answer that ends when the long prompt has its first token."""
STEPS = {FLOOR: 2048, "vllm_mlx": 2048, "ours": 2048, "ours@256": 256}
ROUNDS = 1
BOUND = 2.0


def entry(options: Options, name: str) -> Entry:
    """Return a contender with its chunk."""
    driver = name.partition("@")[0]
    return options.entry(name, driver, prefill_step_size=STEPS[name], enable_prefix_cache=False)


def measure(options: Options) -> Outcome:
    """Run a lone long prompt, then one beside streams."""
    outcome = Outcome()
    long = 1000 if options.quick else LONG
    usual = [name for name in STEPS if name.partition("@")[0] in (options.contenders or STEPS)]
    names = [name for name in usual if name != "vllm_mlx" or options.vllm_python]
    with contest(options, [entry(options, name) for name in names], outcome) as (field, prompts):
        field.warm([Ask(prompt, 8) for prompt in prompts("apart", STREAMS, 45, seed=0)])
        rounds = options.rounds_or(ROUNDS)
        chunk: dict[str, list[float]] = {name: [] for name in names}
        alone = field.rounds(
            rounds,
            lambda n: [Ask(prompt, 1) for prompt in prompts("apart", 1, long, seed=10 + n)],
            [name for name in field.names if name.startswith("ours")],
        )
        for run in alone:
            seconds = first_tokens(run.asks, run.answers)[0]
            chunk[run.contender].append(seconds * STEPS[run.contender] / long)

        def work(number: int) -> list[Ask]:
            short = prompts("apart", STREAMS, 45, seed=20 + number)
            (longer,) = prompts("apart", 1, long, seed=30 + number)
            return [*(Ask(prompt, ENDLESS, with_last=True) for prompt in short), Ask(longer, 1, LATER)]

        series: dict[str, dict[str, list[float]]] = {"gap p50, s": {}, "gap p99, s": {}, "long TTFT, s": {}}
        for run in field.rounds(rounds, work):
            first = run.answers[-1].times[0]
            between = gaps(run.answers[:-1], LATER, first)
            figures = {
                "gap p50, s": percentile(between, 50),
                "gap p99, s": percentile(between, 99),
                "long TTFT, s": first - LATER,
            }
            for figure, value in figures.items():
                series[figure].setdefault(run.contender, []).append(value)
            outcome.samples.append(
                {
                    "contender": run.contender,
                    "round": run.round,
                    "gaps_s": between,
                    "chunk_s": chunk[run.contender],
                    **figures,
                }
            )
        case = f"{long:,} beside {STREAMS}"
        for figure, values in series.items():
            outcome.rows += compare("mixed", case, figure, values)
        for name in filter(chunk.get, names):
            values = series["gap p99, s"].get(name, [])
            share = statistics.median(
                value / one for value, one in zip(values, chunk[name], strict=False) if one
            )
            bar = Bar(name, None, at_most=BOUND) if name.startswith("ours") else None
            outcome.rows.append(
                single("mixed", f"chunk of {STEPS[name]}", name, "gap p99 in chunks", share, bar)
            )
    return outcome
