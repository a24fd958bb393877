"""A new process of each contender: seconds to import, to load the model, and to the first token after that."""

from ..bench import Options, Outcome, contest
from ..table import compare
from ..work import Ask, first_tokens

USUAL = ("stream_generate", "vllm_mlx", "ours", "ours_simple")
ROUNDS = 3
FIGURES = ("import, s", "load, s", "first token, s", "sum, s")


def measure(options: Options) -> Outcome:
    """Start each alone, several times."""
    outcome = Outcome()
    series: dict[str, dict[str, list[float]]] = {figure: {} for figure in FIGURES}
    names = options.chosen(USUAL)
    for number in range(options.rounds_or(ROUNDS)):
        for name in names if number % 2 == 0 else reversed(names):
            with contest(options, [options.entry(name)], outcome) as (field, prompts):
                asks = [Ask(prompt, 1) for prompt in prompts("apart", 1, 45, seed=number)]
                if name not in field.names:
                    continue
                with field.excused(name):
                    facts = field.link(name).facts
                    first = first_tokens(asks, field.link(name).run(asks))[0]
                    seconds = (facts["import_s"], facts["load_s"], first)
                    for figure, value in zip(FIGURES, (*seconds, sum(seconds)), strict=True):
                        series[figure].setdefault(name, []).append(value)
                    outcome.samples.append(
                        {"contender": name, "round": number, "import_load_first_s": seconds}
                    )
    for figure, values in series.items():
        outcome.rows += compare("first_token", "a new process", figure, values, baseline="stream_generate")
    return outcome
