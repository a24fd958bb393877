"""What a call would ask, before anything runs: prompts, token counts, and how long it may take.

Speeds are those that the engine has measured; without any, how long it takes is unknown, and never made up.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pandas as pd

from ..engine.core import EngineCore
from ..engine.intake import Prompt
from ..engine.interrupts import interruptible
from ..request import Chat
from ..session.media import Media, as_text, length
from ..validation import integer
from .columns import column_array
from .generate import Call
from .outcome import Outcome, Skipped
from .rows import Cells

__all__ = ["Preview", "preview_frame"]

_STATES = ["ready", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class Preview:
    """The first rows of a call, and what all of it amounts to. Displayed it is a table and a line.

    Attributes
    ----------
    frame : DataFrame
        With the index of the data: prompt (what the model reads), prompt_tokens, max_tokens, state ("ready",
        "skipped" or "failed") and error.
    answers : int
        That the call asks for.
    prompt_tokens, new_tokens : int
        Of all answers, by the mean of the rows shown; `new_tokens` at most, `prompt_tokens` None where a server has
        the tokenizer.
    seconds : float or None
        How long that takes at the engine's mean speeds so far, if all answers are as long as they may be; None
        before it has run.
    """

    frame: pd.DataFrame
    answers: int
    prompt_tokens: int | None
    new_tokens: int
    seconds: float | None

    def __str__(self) -> str:
        time = (
            "the time is unknown until the engine has run"
            if self.seconds is None
            else (f"up to {_duration(self.seconds)} at the speed so far")
        )
        read = "" if self.prompt_tokens is None else f"about {self.prompt_tokens:,} prompt tokens, "
        return f"{self.answers:,} answers, {read}at most {self.new_tokens:,} new tokens; {time}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython gives it
        printer.text(f"{self.frame}\n{self}")

    def _repr_html_(self) -> str:
        return f"{self.frame.to_html()}<p>{html.escape(str(self))}</p>"


def preview_frame(
    data: pd.DataFrame | pd.Series, template: str | None = None, rows: int = 5, **options: Any
) -> Preview:
    """Render the first prompts of a call, and estimate what the whole of it takes. Generates nothing.

    Parameters
    ----------
    data, template, **options
        As of `mlx_nb.generate_frame`.
    rows : int
        How many to render.
    """
    count = integer("rows", rows, low=1)
    call = Call(data, template, **options)
    with interruptible():
        call.core.wait_ready()
    call.check()
    looks = [_look(call, cells) for cells in islice(call.rows, count)]
    ready = [look for look in looks if look.state == "ready"]
    each = call.answers / len(looks) if looks else 0.0  # if the other rows are like these
    prompt = None
    if not call.core.info.remote:
        prompt = round(each * sum(look.prompt_tokens or 0 for look in ready))
    new = round(each * sum(look.max_tokens or 0 for look in ready))
    frame = pd.DataFrame(
        {
            "prompt": column_array([look.prompt for look in looks], "string"),
            "prompt_tokens": column_array([look.prompt_tokens for look in looks], "Int64"),
            "max_tokens": column_array([look.max_tokens for look in looks], "Int64"),
            "state": pd.Categorical([look.state for look in looks], categories=_STATES),
            "error": column_array([look.error for look in looks], "string"),
        },
        index=call.rows.source.index[: len(looks)],
    )
    return Preview(frame, call.answers, prompt, new, _seconds(call.core, prompt, new))


@dataclass(frozen=True, slots=True)
class _Look:
    """A row before it runs."""

    state: str
    error: str | None = None
    prompt: str | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None


def _look(call: Call, cells: Cells) -> _Look:
    core = call.core
    try:
        ask = call.ask(cells)
        if core.info.remote:
            core.check(ask.params)
            return _Look("ready", None, _said(ask.prompt), None, ask.params.max_tokens)
        tokens = core.codec.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
        assert not isinstance(tokens, Chat)
        core.check(ask.params, tokens)
        count = length(core, tokens, Media(tuple(ask.images or ())))
    except Skipped as skipped:
        return _Look("skipped", str(skipped))
    except Exception as error:
        return _Look("failed", Outcome.failed(error).error)
    return _Look("ready", None, core.codec.decode(tokens), count, ask.params.max_tokens)


def _said(prompt: Prompt) -> str:
    """What a server is sent, to read."""
    if not isinstance(prompt, Chat):
        return str(prompt)
    return "\n\n".join(f"{message['role']}: {as_text(message['content'])}" for message in prompt.messages)


def _seconds(core: EngineCore, prompt_tokens: int | None, new_tokens: int) -> float | None:
    if prompt_tokens is None:
        return None
    stats = core.get_stats()
    reading, writing = stats["mean_prompt_tps"], stats["mean_generation_tps"]
    return prompt_tokens / reading + new_tokens / writing if reading and writing else None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
