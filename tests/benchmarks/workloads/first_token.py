"""A new process of each contender: seconds to import, to load the model, and to the first token after that."""

from ..bench import Options, Outcome, contest
from ..link import Link
from ..table import compare
from ..work import Ask, first_tokens

USUAL = ("stream_generate", "vllm_mlx", "ours", "ours_simple")
ROUNDS = 2
FIGURES = ("import, s", "load, s", "first token, s", "sum, s")


def measure(options: Options) -> Outcome:
    """Start each alone, several times."""
    outcome = Outcome()
    series: dict[str, dict[str, list[float]]] = {figure: {} for figure in FIGURES}
    names = options.chosen(USUAL)
    rounds = options.rounds_or(ROUNDS)
    with contest(options, [], outcome) as (field, prompts):
        written = prompts("apart", rounds, 45, seed=1)
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                asks = [Ask(written[number], 1)]
                with field.excused(name), Link(options.entry(name), options.folder) as link:
                    first = first_tokens(asks, link.run(asks))[0]
                    outcome.facts[name] = link.facts
                    seconds = (link.facts["import_s"], link.facts["load_s"], first)
                    for figure, value in zip(FIGURES, (*seconds, sum(seconds)), strict=True):
                        series[figure].setdefault(name, []).append(value)
                    outcome.samples.append(
                        {"contender": name, "round": number, "import_load_first_s": seconds}
                    )
    for figure, values in series.items():
        outcome.rows += compare("first_token", "a new process", figure, values, baseline="stream_generate")
    return outcome
