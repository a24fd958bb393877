"""Prompts that share their first 1,000 tokens: eight together, and a few one after another.

One after another, mlx-lm's stream is given the cache of the prompt before, trimmed by hand to what both share. Every
round has another thousand, so that it begins cold.
"""

import statistics

from ..bench import Field, Options, Outcome, contest
from ..table import Bar, Row, compare, single
from ..work import Ask, Prompt, first_tokens, tokens_a_second

SHARED, TAIL, TOGETHER, NEW, IN_TURN = 1000, 20, 8, 16, 4
ROUNDS = 2
TOGETHER_USUAL = ("batch_generate", "vllm_mlx", "ours")
IN_TURN_USUAL = ("by_hand", "vllm_mlx", "ours", "ours_simple", "mlx_lm_server")
BARS = [Bar("ours", "batch_generate", at_least=4.0)]
BARS_IN_TURN = [Bar("ours", "by_hand", at_most=1.0)]
HIT = Bar("ours", None, at_most=0.5)
"""The second prompt's time as a share of the first's: it hits, or it doesn't."""


def measure(options: Options) -> Outcome:
    """Run both orders; contenders of either are up together."""
    outcome = Outcome()
    together, in_turn = options.chosen(TOGETHER_USUAL), options.chosen(IN_TURN_USUAL)
    names = list(dict.fromkeys([*together, *in_turn]))
    entries = [options.entry(name, rows=TOGETHER) for name in names]
    shared = 200 if options.quick else SHARED
    rounds = options.rounds_or(ROUNDS)
    with contest(options, entries, outcome) as (field, prompts):

        def write(seed: int, count: int) -> list[Prompt]:
            return prompts("shared", count, shared + TAIL, seed=seed, shared=shared)

        field.warm([Ask(prompt, 4) for prompt in prompts("apart", 2, 100, seed=0)])
        speeds: dict[str, list[float]] = {name: [] for name in together if name in field.names}

        def work(number: int) -> list[Ask]:
            return [Ask(prompt, NEW, streams=False) for prompt in write(1 + number, TOGETHER)]

        for run in field.rounds(rounds, work, list(speeds), {"vllm_mlx": 1}):
            speeds[run.contender].append(tokens_a_second(run.answers))
            outcome.samples.append(
                {
                    "case": "together",
                    "contender": run.contender,
                    "round": run.round,
                    "tokens_a_second": speeds[run.contender][-1],
                }
            )
        outcome.rows += compare("shared", "together", "tokens/s", speeds, BARS, "batch_generate")
        outcome.rows += one_after_another(
            field, outcome, [write(101 + number, IN_TURN) for number in range(rounds)], in_turn
        )
    return outcome


def one_after_another(
    field: Field, outcome: Outcome, written: list[list[Prompt]], names: list[str]
) -> list[Row]:
    """Return the rows of first tokens: of the first prompt, which is cold, the second, and those that follow."""
    series: dict[str, dict[str, list[float]]] = {"cold": {}, "second": {}, "later": {}}
    for number, prompts in enumerate(written):
        here = [name for name in names if name in field.names]
        for name in here if number % 2 == 0 else reversed(here):
            with field.excused(name):
                waits = []
                for prompt in prompts:
                    asks = [Ask(prompt, 4)]
                    waits += first_tokens(asks, field.link(name).run(asks))
                outcome.samples.append(
                    {"case": "one after another", "contender": name, "round": number, "ttft_s": waits}
                )
                values = {"cold": waits[0], "second": waits[1], "later": statistics.median(waits[2:])}
                for case, value in values.items():
                    series[case].setdefault(name, []).append(value)
    rows = []
    for case, values_of in series.items():
        bars = BARS_IN_TURN if case == "later" else ()
        rows += compare("shared", f"one after another, {case}", "TTFT, s", values_of, bars, "by_hand")
    for name, seconds in series["second"].items():
        share = statistics.median(
            second / cold for second, cold in zip(seconds, series["cold"][name], strict=True)
        )
        rows.append(
            single("shared", "second of cold", name, "share", share, HIT if name == HIT.contender else None)
        )
    return rows
