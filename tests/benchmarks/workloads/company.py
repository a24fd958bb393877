"""A lone answer that gets company and loses it again: its tokens stay the same, and its speed comes back.

The answer streams alone; then two others come, after a quarter and a half of the time that it took, and end; then it
streams alone once more. What is compared is the speed before they come and after they have gone.
"""

from ..bench import Options, Outcome, contest
from ..table import Bar, compare, single
from ..work import Answer, Ask

NEW, SHORT = 160, 16
ROUNDS = 3
USUAL = ("vllm_mlx", "ours")
REFERENCE = "stream_generate"
AFTER = "speed after company, of before"


def alike(one: Answer, two: Answer) -> int:
    """Return how many tokens are the same before the first that isn't."""
    pairs = zip(one.ids or [], two.ids or [], strict=True)
    return next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), len(one.ids or []))


def speed(answer: Answer, since: float, until: float) -> float:
    """Return the tokens a second between two moments; 0 if that is no time to speak of."""
    made = sum(since < moment <= until for moment in answer.times)
    return made / (until - since) if made > 1 else 0.0


def measure(options: Options) -> Outcome:
    """Run it with and without company, beside mlx-lm's single stream, which can have none."""
    outcome = Outcome()
    new = 40 if options.quick else NEW
    entries = [options.entry(name) for name in (REFERENCE, *options.chosen(USUAL))]
    series: dict[str, dict[str, list[float]]] = {"tokens/s alone": {}, AFTER: {}}
    same: dict[str, list[int]] = {}
    with contest(options, entries, outcome) as (field, prompts):
        field.warm([Ask(prompt, SHORT) for prompt in prompts("apart", 3, 45, seed=0)])
        for number in range(options.rounds_or(ROUNDS)):
            lone, *others = prompts("apart", 3, 45, seed=1 + number)
            for run in field.rounds(1, lambda _, lone=lone: [Ask(lone, new)]):  # type: ignore[misc]
                name, alone = run.contender, run.answers[0]
                series["tokens/s alone"].setdefault(name, []).append(new / alone.end)
                outcome.samples.append({"contender": name, "round": number, "alone_s": alone.times})
                if name == REFERENCE:
                    reference = alone
                    continue
                asks = [Ask(lone, new)]
                asks += [Ask(other, SHORT, alone.end * (n + 1) / 4) for n, other in enumerate(others)]
                with field.excused(name):
                    beside, *company = field.link(name).run(asks)
                    gone = max(answer.end for answer in company)
                    outcome.samples.append({"contender": name, "round": number, "in_company_s": beside.times})
                    before = speed(beside, beside.times[0], asks[1].at)
                    after = speed(beside, gone, beside.end)
                    if before and after:
                        series[AFTER].setdefault(name, []).append(after / before)
                    same.setdefault(name, []).append(min(alike(beside, alone), alike(alone, reference)))
    for figure, values in series.items():
        bars = [Bar("ours", REFERENCE, at_least=0.95)] if figure == "tokens/s alone" and field.gpu else []
        outcome.rows += compare("company", "one, then three", figure, values, bars, REFERENCE)
    for name, counts in same.items():
        bar = Bar("ours", None, at_least=new) if name == "ours" else None
        outcome.rows.append(
            single("company", "one, then three", name, f"same tokens of {new}", min(counts), bar)
        )
    return outcome
