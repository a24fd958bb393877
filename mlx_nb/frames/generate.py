"""A prompt over a DataFrame: what the accessors, the magic and scripts all call."""

from __future__ import annotations

import asyncio
from typing import Any

import pandas as pd

from ..engine.core import EngineCore
from ..engine.interrupts import ends_the_loop, interruptible
from ..errors import RequestError
from ..sampling import SamplingParams
from ..session.session import default_session, prompt_for
from .job import Ask, Job
from .results import GenerationCancelled, GenerationInterrupted, Results
from .rows import Rows

__all__ = ["agenerate_frame", "generate_frame"]

GREEDY = SamplingParams(temperature=0)


def generate_frame(
    data: pd.DataFrame | pd.Series,
    template: str | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    engine: str | None = None,
    progress: bool = True,
    **sampling: Any,
) -> pd.DataFrame:
    """Answer a prompt for every row.

    Parameters
    ----------
    data : DataFrame or Series
    template : str
        The prompt, with columns as ``{{ name }}``; Jinja blocks (``{% if note %}``) work. A Series goes by its name,
        or as "text" if it has none; without a template its texts are the prompts.
    system : str, optional
        System prompt of all rows.
    raw : bool
        Leave the chat template out.
    engine : str, optional
        Name of the engine; the current one if None.
    progress : bool
        Show a bar.
    **sampling
        Fields of `SamplingParams`. Frames decode greedily (``temperature=0``) unless told otherwise.

    Returns
    -------
    DataFrame
        One row for each of `data`, in order and with its index: text, finish_reason, prompt_tokens,
        completion_tokens, cached_tokens, error. A row whose template prints a null or an empty text is "skipped",
        a failing one "error"; `error` says why.

    Raises
    ------
    TemplateError, RequestError, ValueError
        Before anything is generated: a column that isn't there, a parameter out of range.
    EngineNotStarted
        Without an engine.
    GenerationInterrupted
        On Ctrl-C or Interrupt; its `partial` holds what was finished. In a task beside a cell's it is
        GenerationCancelled, since a kernel doesn't survive the other.
    """
    rows = Rows(data, template)
    params = _params(sampling, system=system, raw=raw)
    core = default_session().get(engine).core
    with interruptible():
        core.wait_ready()
    with Results(rows.index, progress=progress) as results:
        try:
            _job(core, rows, params, results, system=system, raw=raw).run()
        except KeyboardInterrupt:
            kind = GenerationCancelled if ends_the_loop() else GenerationInterrupted
            raise kind(results.frame()) from None
    return results.frame()


async def agenerate_frame(
    data: pd.DataFrame | pd.Series,
    template: str | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    engine: str | None = None,
    progress: bool = True,
    **sampling: Any,
) -> pd.DataFrame:
    """`generate_frame`, awaited: the event loop stays free meanwhile.

    Cancelling aborts the rows in flight and raises GenerationCancelled, whose `partial` holds what was finished.
    """
    rows = Rows(data, template)
    params = _params(sampling, system=system, raw=raw)
    core = default_session().get(engine).core
    await core.ready()
    with Results(rows.index, progress=progress) as results:
        try:
            await _job(core, rows, params, results, system=system, raw=raw).arun()
        except asyncio.CancelledError:
            raise GenerationCancelled(results.frame()) from None
    return results.frame()


def _params(sampling: dict[str, Any], *, system: str | None, raw: bool) -> SamplingParams:
    params = GREEDY.but(**sampling)
    if raw and (system is not None or params.thinking is not None):
        raise RequestError("system and thinking act through the chat template: leave them out, or raw")
    return params


def _job(
    core: EngineCore, rows: Rows, params: SamplingParams, results: Results, *, system: str | None, raw: bool
) -> Job[Any]:
    def ask(values: Any) -> Ask:
        text = rows.prompt(values)
        return Ask(prompt_for(core, text, system=system, raw=raw, thinking=params.thinking), text)

    return Job(core, rows, ask, params, results.record)
