"""Chats that arrive while others are at work: time to the first token, and throughput.

16 requests share only the header of the chat template; one every 100 ms, or eight together and eight more a second
later. All answers are streamed.
"""

from collections.abc import Callable

from ..bench import Options, Outcome, contest
from ..table import FLOOR, Bar, compare
from ..work import Ask, first_tokens, percentile, tokens_a_second

COUNT, QUESTION, NEW = 16, 18, 24
"""Tokens of the question alone; SmolLM2's header has 28 more."""
USUAL = (FLOOR, "vllm_mlx", "ours", "mlx_lm_server")
PATTERNS: dict[str, tuple[Callable[[int], float], int]] = {
    "every 100 ms": (lambda number: 0.1 * number, 5),
    "two bursts": (lambda number: float(number // 8), 2),
}
"""When each request arrives, and the rounds."""
BARS = {
    "TTFT p50, s": [Bar("ours", at_most=0.7)],
    "TTFT p95, s": [Bar("ours", at_most=0.7)],
    "tokens/s": [Bar("ours", at_least=1.05)],
}


def measure(options: Options) -> Outcome:
    """Run both patterns."""
    outcome = Outcome()
    count = 4 if options.quick else COUNT
    entries = [options.entry(name, rows=COUNT) for name in options.chosen(USUAL, ("ours_simple",))]
    with contest(options, entries, outcome) as (field, prompts):
        for place, (pattern, (arrival, usual)) in enumerate(PATTERNS.items()):

            def work(
                number: int, arrival: Callable[[int], float] = arrival, place: int = place, new: int = NEW
            ) -> list[Ask]:
                written = prompts("chat", count, QUESTION, seed=1000 * place + number)
                return [Ask(prompt, new, arrival(n)) for n, prompt in enumerate(written)]

            if place == 0:
                field.warm(work(-1, new=4))
            series: dict[str, dict[str, list[float]]] = {figure: {} for figure in BARS}
            for run in field.rounds(options.rounds_or(usual), work):
                waits = first_tokens(run.asks, run.answers)
                figures = {
                    "TTFT p50, s": percentile(waits, 50),
                    "TTFT p95, s": percentile(waits, 95),
                    "tokens/s": tokens_a_second(run.answers),
                }
                for figure, value in figures.items():
                    series[figure].setdefault(run.contender, []).append(value)
                outcome.samples.append(
                    {
                        "case": pattern,
                        "contender": run.contender,
                        "round": run.round,
                        "ttft_s": waits,
                        **figures,
                    }
                )
            for figure, values in series.items():
                bars = BARS[figure] if pattern == "every 100 ms" else ()
                outcome.rows += compare("arrivals", pattern, figure, values, bars)
    return outcome
