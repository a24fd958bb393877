"""Jobs in tests: prompts in, outcomes by position out."""

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_nb import EngineCore, SamplingParams
from mlx_nb.frames.job import Ask, Job, Outcome

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def make_job(
    core: EngineCore,
    prompts: Iterable[Any],
    outcomes: dict[int, Outcome],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    **options: Any,
) -> Job[Any]:
    """Return a job over prompts that records into `outcomes`; an exception among the prompts is raised."""

    def ask(row: tuple[int, Any]) -> Ask:
        number, prompt = row
        if isinstance(prompt, Exception):
            raise prompt
        its = params if isinstance(params, SamplingParams) else params[number]
        return Ask(prompt, prompt if isinstance(prompt, str) else "tokens", its)

    def record(position: int, outcome: Outcome) -> None:
        assert position not in outcomes, "recorded twice"
        outcomes[position] = outcome

    return Job(core, enumerate(prompts), ask, record, recall=outcomes.__getitem__, **options)


def run_job(core: EngineCore, prompts: Iterable[Any], *args: Any, **options: Any) -> list[Outcome]:
    """Return the outcomes of a job that ran to its end."""
    outcomes: dict[int, Outcome] = {}
    make_job(core, prompts, outcomes, *args, **options).run()
    return [outcomes[position] for position in sorted(outcomes)]
