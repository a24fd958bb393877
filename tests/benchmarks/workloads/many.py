"""10,000 short requests through a tiny model: their rate, and memory, which must not grow."""

from ..bench import Options, Outcome, contest
from ..table import FLOOR, Bar, compare, single
from ..work import Ask, tokens_a_second

TURNS, AT_ONCE, PROMPT, NEW = 10, 1000, 12, 8
CACHE_MIB = 16
"""Of stored prefixes: full before half of them are done."""
FLAT = Bar("ours", None, at_most=1.03)
"""What is held after the last thousand, as a share of what was held after half of them."""


def measure(options: Options) -> Outcome:
    """Run them a thousand at a time."""
    outcome = Outcome()
    turns, at_once = (4, 100) if options.quick else (TURNS, AT_ONCE)
    entries = [
        options.entry(name, cache_memory_mb=CACHE_MIB) for name in options.chosen((FLOOR, "vllm_mlx", "ours"))
    ]
    with contest(options, entries, outcome, options.tiny) as (field, prompts):

        def work(number: int) -> list[Ask]:
            written = prompts("apart", at_once, PROMPT, seed=number)
            return [Ask(prompt, NEW, streams=False) for prompt in written]

        rates: dict[str, list[float]] = {}
        held: dict[str, list[float]] = {}
        for run in field.rounds(turns, work):
            with field.excused(run.contender):
                held.setdefault(run.contender, []).append(field.link(run.contender).memory()["held_mib"])
            rates.setdefault(run.contender, []).append(tokens_a_second(run.answers) / NEW)
        outcome.samples += [
            {"contender": name, "requests_a_second": rates[name], "held_mib": held[name]} for name in held
        ]
        case = f"{turns * at_once:,}"
        outcome.rows += compare("many", case, "requests/s", rates)
        for name, mib in held.items():
            bar = FLAT if name == FLAT.contender else None
            outcome.rows.append(
                single("many", case, name, "memory, end to half", mib[-1] / mib[len(mib) // 2], bar)
            )
    return outcome
