"""Throughput of so many requests at once: prompts of 45 tokens, all different, in every round new ones.

Whole answers are asked for, as a DataFrame does; ``ours_stream`` streams each, as a chat does. Contenders without a
bar take part in the first rounds only.
"""

from collections import Counter
from statistics import median

from ..bench import Options, Outcome, contest
from ..table import AGAIN, FLOOR, Bar, Row, compare, single
from ..work import Answer, Ask, same, tokens_a_second

SIZES = (1, 2, 4, 8, 16, 32)
PROMPT = 45
NEW = {1: 24, 2: 24}
"""Tokens of an answer, on a CPU and from few rows; short, for more rounds in the same time."""
NEW_ELSE, NEW_ON_GPU = 16, 64
USUAL = (FLOOR, "vllm_mlx", "ours", "ours_stream", "batch_generate", "stream_generate", "mlx_lm_server")
BESIDE = ("ours_simple", "vllm_mlx_simple")
ALONE = {"stream_generate", "ours_simple", "vllm_mlx_simple"}
"""They run one request at a time."""
WITH_BARS = {FLOOR, "vllm_mlx", "ours"}
ROUNDS, OF_THE_COPY, FEWER = 12, 6, 2
FEWER_SIZES = {1, 8}
"""Sizes of contenders without a bar, on a CPU and unless they are named."""


def bars(size: int, gpu: bool) -> list[Bar]:
    """Return what must be reached."""
    if gpu and size == 1:
        return [Bar("ours", "stream_generate", at_least=0.95)]
    if not gpu and size > 16:
        return []
    return [Bar("ours", at_least=0.97), Bar("ours", "vllm_mlx", at_least=1.0)]


def measure(options: Options) -> Outcome:
    """Run the sizes, each with all of its rounds."""
    outcome = Outcome()
    sizes = options.sizes or (SIZES[:2] if options.quick else SIZES)
    names = options.chosen(USUAL, BESIDE)
    entries = [options.entry(name, rows=max(sizes)) for name in names]
    with contest(options, entries, outcome) as (field, prompts):
        gpu = field.gpu
        for size in sizes:
            new = options.new or (NEW_ON_GPU if gpu else NEW.get(size, NEW_ELSE))
            bars_here = bars(size, gpu)
            pressed = {bar.against for bar in bars_here} | WITH_BARS
            everybody = gpu or options.contenders or size in FEWER_SIZES
            here = [
                name
                for name in field.names
                if (size == 1 or name not in ALONE) and (everybody or name in pressed | {AGAIN})
            ]
            rounds = options.rounds_or(ROUNDS if bars_here else FEWER)
            fewer = {name: min(FEWER, rounds) for name in here if name not in pressed}
            fewer[AGAIN] = min(OF_THE_COPY, rounds)

            def work(number: int, size: int = size, new: int = new) -> list[Ask]:
                written = prompts("apart", size, PROMPT, seed=1000 * size + number)
                return [Ask(prompt, new, streams=False) for prompt in written]

            field.warm(work(-1), here)
            series: dict[str, list[float]] = {name: [] for name in here}
            answers: dict[tuple[str, int], list[Answer]] = {}
            for run in field.rounds(rounds, work, here, fewer):
                speed = tokens_a_second(run.answers)
                series[run.contender].append(speed)
                answers[run.contender, run.round] = run.answers
                outcome.samples.append(
                    {"case": size, "contender": run.contender, "round": run.round, "tokens_a_second": speed}
                )
            options.say(
                f"  batch {size}: " + ", ".join(f"{k} {median(v):.1f}" for k, v in series.items() if v)
            )
            outcome.rows += compare("batch", str(size), "tokens/s", series, bars_here)
            outcome.rows += unlike(str(size), answers)
    return outcome


def unlike(case: str, answers: dict[tuple[str, int], list[Answer]]) -> list[Row]:
    """Return a row for each contender that did not answer as the floor: of equals there need be none."""
    other: Counter[str] = Counter()
    for (name, number), mine in answers.items():
        if (FLOOR, number) in answers:
            other[name] += len(mine) - same(mine, answers[FLOOR, number])
    return [
        single("batch", case, name, "answers unlike the floor's", count)
        for name, count in other.items()
        if count
    ]
