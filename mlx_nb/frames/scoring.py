"""How likely a model finds given answers: log-likelihoods by teacher forcing.

The answers are generated as any other, each token forced, and the model's own log-probabilities of them are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jinja2
import pandas as pd

from ..engine.core import EngineCore
from ..engine.intake import Prompt
from ..errors import RequestError
from ..request import Chat
from ..sampling import SamplingParams
from ..validation import choice, several
from .columns import column_array, free_name
from .generate import Call
from .options import Column
from .outcome import Ask, Outcome, Skipped
from .results import Ending, state_array, unanswered
from .rows import Cells

__all__ = ["ascore_frame", "score_frame"]

OPTIONS = ("system", "messages", "raw", "engine", "model", "progress", "thinking")


def score_frame(
    data: pd.DataFrame | pd.Series,
    template: str | None,
    continuations: Sequence[str] | Column,
    *,
    per: Literal["text", "token"] = "text",
    **options: Any,
) -> pd.DataFrame:
    """How likely the model finds given answers to every row's prompt.

    Parameters
    ----------
    data, template
        As of `mlx_nb.generate_frame`.
    continuations : sequence of str, or a column
        Several give a column each, called like it, and "best", the likeliest. ``mlx_nb.col("answer")`` is one of
        the row's own, and gives the columns "logprob" and "tokens".
    per : {"text", "token"}
        The natural log-likelihood of the whole text, or its mean over the text's tokens.
    **options
        Of `mlx_nb.generate_frame`: system, messages, raw, engine, model, thinking, progress.

    Returns
    -------
    DataFrame
        With the index of `data`; also the row's state and error.
    """
    return _Scoring(data, template, continuations, per, options).run()


async def ascore_frame(
    data: pd.DataFrame | pd.Series,
    template: str | None,
    continuations: Sequence[str] | Column,
    *,
    per: Literal["text", "token"] = "text",
    **options: Any,
) -> pd.DataFrame:
    """`score_frame`, awaited."""
    return await _Scoring(data, template, continuations, per, options).arun()


class _Scoring(Call):
    """A call whose answers are given; its samples are the continuations."""

    def __init__(
        self,
        data: Any,
        template: str | None,
        continuations: Sequence[str] | Column,
        per: Literal["text", "token"],
        options: Mapping[str, Any],
    ) -> None:
        choice("per", per, ("text", "token"))
        for name in options:
            if name not in OPTIONS:
                raise RequestError(f"score takes no {name}: its options are {', '.join(OPTIONS)}")
        self._column = continuations.name if isinstance(continuations, Column) else None
        self._texts = () if isinstance(continuations, Column) else _texts(continuations)
        also = [continuations.name] if isinstance(continuations, Column) else []
        super().__init__(data, template, also=also, **options)
        self.form = _Form(self._texts, per)

    def check(self) -> None:
        """Refuse a server. The model must be there."""
        if self.core.info.remote:
            raise RequestError(
                "a server doesn't tell how likely a given answer is: use an engine of this process"
            )
        super().check()

    def ask(self, cells: Cells, sample: int = 0) -> Ask:
        """What a row asks with one of its continuations."""
        from ..backends.forcing import forced

        ask = super().ask(cells)
        text = self._texts[sample] if self._texts else _text(cells[self._column])
        prompt, answer = _divided(self.core, ask.prompt, text)
        params = SamplingParams(
            temperature=0,
            max_tokens=len(answer),
            logprobs=0,
            ignore_eos=True,
            logits_processors=[forced(answer, len(prompt))],
        )
        return Ask(prompt, ask.text, params)


def _texts(continuations: Sequence[str]) -> tuple[str, ...]:
    texts = several("continuations", continuations)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("continuations are texts that aren't empty, or a column: mlx_nb.col(…)")
    if len(set(texts)) < len(texts):
        raise RequestError("continuations must all be different")
    return texts


def _text(cell: Any) -> str:
    if isinstance(cell, jinja2.Undefined):
        raise Skipped(cell._undefined_message)
    if not isinstance(cell, str):
        raise RequestError(f"a continuation is a text, got {cell!r}")
    return cell


def _divided(core: EngineCore, prompt: Prompt, continuation: str) -> tuple[list[int], list[int]]:
    """Prompt and continuation as tokens. Of raw text the whole is divided: a token may reach over the border."""
    assert not isinstance(prompt, Chat)  # see `check`
    encode = core.codec.encode
    if isinstance(prompt, str):
        whole, alone = encode(prompt + continuation), encode(prompt)
        same = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), len(alone))
        prompt, answer = whole[:same], whole[same:]
    else:
        start = encode("")  # a BOS belongs to the prompt alone
        answer = encode(continuation)
        answer = answer[len(start) :] if answer[: len(start)] == start else answer
    if not prompt or not answer:
        raise RequestError("the continuation adds no tokens to the prompt")
    return prompt, answer


class _Form:
    """The result's columns.

    Parameters
    ----------
    texts : sequence of str
        The continuations; none if each row has its own.
    """

    def __init__(self, texts: Sequence[str], per: Literal["text", "token"]) -> None:
        self._texts, self._per = texts, per
        self.samples = len(texts) or None
        self.added: list[str] | None = None

    def read(self, outcome: Outcome, params: SamplingParams) -> Ending:  # noqa: ARG002 - Form has it
        """A row's end with one continuation; its value is the log-likelihood."""
        if not outcome.answered:
            return unanswered(outcome)
        logprobs = [token.logprob for token in outcome.logprobs or ()]
        if outcome.finish_reason != "length" or len(logprobs) != outcome.completion_tokens:
            error = "the engine gave no log-probabilities of this text"
            return Ending(outcome, "failed", "error", error=error)
        total = sum(logprobs)
        return Ending(outcome, "done", "stop", value=total / len(logprobs) if self._per == "token" else total)

    def frame(self, source: pd.DataFrame, endings: Sequence[Ending]) -> pd.DataFrame:
        """A row for each of the source's."""
        width = self.samples or 1
        rows = [endings[start : start + width] for start in range(0, len(endings), width)]
        columns = self._several(rows) if self._texts else self._own(endings)
        worst = [next((ending for ending in row if ending.state != "done"), row[0]) for row in rows]
        columns["state"] = state_array([ending.state for ending in worst])
        columns["error"] = column_array([ending.error for ending in worst], "string")
        return pd.DataFrame(columns, index=source.index)

    def _several(self, rows: Sequence[Sequence[Ending]]) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for i, text in enumerate(self._texts):
            name = free_name(text, {"best", "state", "error", *columns})
            columns[name] = column_array([row[i].value for row in rows], "Float64")
        best = [self._likeliest([ending.value for ending in row]) for row in rows]
        columns["best"] = column_array(best, pd.CategoricalDtype(list(self._texts)))
        return columns

    def _likeliest(self, values: Sequence[float | None]) -> str | None:
        known = [(value, -i) for i, value in enumerate(values) if value is not None]
        return self._texts[-max(known)[1]] if len(known) == len(values) else None

    @staticmethod
    def _own(endings: Sequence[Ending]) -> dict[str, Any]:
        return {
            "logprob": column_array([ending.value for ending in endings], "Float64"),
            "tokens": column_array([ending.outcome.completion_tokens for ending in endings], "Int64"),
        }
