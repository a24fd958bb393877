"""The most memory that a process of each contender held, after batches of 1, 8 and 16."""

from ..bench import Options, Outcome, contest
from ..link import Entry
from ..table import AGAIN, FLOOR, Bar, compare
from ..work import Ask

SIZES, PROMPT, NEW = (1, 8, 16), 45, 32
BARS = [Bar("ours, no prefix cache", at_most=1.04)]
ROUNDS = 1
"""New processes each time."""


def entries(options: Options) -> list[Entry]:
    """Return the contenders, ours with the prefix cache and without."""
    made = [options.entry(name) for name in options.chosen((FLOOR, "vllm_mlx", "ours")) if name != AGAIN]
    if any(entry.driver == "ours" for entry in made):
        made.append(options.entry("ours, no prefix cache", "ours", enable_prefix_cache=False))
    return made


def measure(options: Options) -> Outcome:
    """Run, and ask each process what it held at most."""
    outcome = Outcome()
    sizes = SIZES[:1] if options.quick else SIZES
    series: dict[str, dict[str, list[float]]] = {"peak MiB": {}, "GPU peak MiB": {}}
    for number in range(options.rounds_or(ROUNDS)):
        with contest(options, entries(options), outcome) as (field, prompts):
            for size in sizes:
                written = prompts("apart", size, PROMPT, seed=100 * size + number)
                field.warm([Ask(prompt, NEW, streams=False) for prompt in written])
            for name in field.names:
                with field.excused(name):
                    held = field.link(name).memory()
                    outcome.samples.append({"contender": name, "round": number, **held})
                    series["peak MiB"].setdefault(name, []).append(held["peak_mib"])
                    if field.gpu and "mlx_peak_mib" in held:
                        series["GPU peak MiB"].setdefault(name, []).append(held["mlx_peak_mib"])
    for figure, values in series.items():
        outcome.rows += compare("memory", "1, 8, 16", figure, values, BARS)
    return outcome
