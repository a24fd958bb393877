"""A storm of requests that leave again soon: what it takes from those that stay. On a tiny model.

Four answers stream alone, and then beside four hundred requests, one every 2.5 ms, that each leave after 20 ms. Those
that stay must say the same both times.
"""

from ..bench import Options, Outcome, contest
from ..table import FLOOR, compare, single
from ..work import Ask, same

STAYING, NEW, STORM, EVERY, AFTER = 4, 600, 400, 0.0025, 0.02
ROUNDS = 5
USUAL = (FLOOR, "vllm_mlx", "ours")


def measure(options: Options) -> Outcome:
    """Run both in every round."""
    outcome = Outcome()
    storm = 40 if options.quick else STORM
    entries = [options.entry(name) for name in options.chosen(USUAL)]
    with contest(options, entries, outcome, options.tiny) as (field, prompts):
        staying = [Ask(prompt, NEW) for prompt in prompts("apart", STAYING, 45, seed=1)]
        leaving = [
            Ask(prompt, NEW, n * EVERY, n * EVERY + AFTER)
            for n, prompt in enumerate(prompts("apart", storm, 20, seed=2))
        ]
        field.warm(staying)
        kept: dict[str, list[float]] = {}
        unlike: dict[str, int] = {}
        rounds = options.rounds_or(ROUNDS)
        for number in range(rounds):
            for run in field.rounds(1, lambda _: staying):
                with field.excused(run.contender):
                    beside = field.link(run.contender).run(staying + leaving)
                    calm = max(answer.end for answer in run.answers)
                    stormy = max(answer.end for answer in beside[:STAYING])
                    kept.setdefault(run.contender, []).append(calm / stormy)
                    other = STAYING - same(beside[:STAYING], run.answers)
                    unlike[run.contender] = unlike.get(run.contender, 0) + other
                    outcome.samples.append(
                        {
                            "contender": run.contender,
                            "round": number,
                            "alone_s": calm,
                            "in_the_storm_s": stormy,
                            "made_by_the_leaving": sum(answer.made for answer in beside[STAYING:]),
                        }
                    )
        case = f"{storm} in {storm * EVERY:g} s"
        outcome.rows += compare("aborts", case, "speed kept", kept)
        outcome.rows += [
            single("aborts", case, name, "answers that changed", count)
            for name, count in unlike.items()
            if count
        ]
    return outcome
