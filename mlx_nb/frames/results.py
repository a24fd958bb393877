"""Outcomes in the order of the caller's rows, and the DataFrame they make.

Owns the result's columns, what state a row ended in, and how results go with the source. Every name is settled,
and what would clash refused, before anything runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd

from ..errors import RequestError
from ..sampling import SamplingParams
from ..session.structured import read_structured
from .columns import Dtype, Field, column_array, free_name
from .outcome import Outcome

__all__ = [
    "Ending",
    "Form",
    "GenerationCancelled",
    "GenerationInterrupted",
    "Layout",
    "Results",
    "state_array",
    "unanswered",
]

STATES = ("done", "truncated", "skipped", "failed", "aborted")
"""How a row ends. "truncated": by max_tokens, or before its JSON was complete."""

State = Literal["done", "truncated", "skipped", "failed", "aborted"]

_STATE = pd.CategoricalDtype(list(STATES))
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")
_SECONDS = ("queue_s", "ttft_s", "total_s")
_NEVER_RUN = Outcome("abort", error="aborted before it was started")


class GenerationInterrupted(KeyboardInterrupt):
    """A job was interrupted.

    Attributes
    ----------
    partial : DataFrame
        The result so far: finished rows as they are, the others "aborted".
    done, rows : int
        How many are finished, of how many.
    """

    def __init__(self, partial: Any, done: int, rows: int) -> None:
        super().__init__(f"{done:,} of {rows:,} rows are finished: see .partial")
        self.partial, self.done, self.rows = partial, done, rows


class GenerationCancelled(asyncio.CancelledError):
    """An awaited job was cancelled; as `GenerationInterrupted`."""

    def __init__(self, partial: Any, done: int, rows: int) -> None:
        super().__init__()
        self.partial, self.done, self.rows = partial, done, rows


@dataclass(frozen=True, slots=True)
class Ending:
    """A row's end, read.

    Attributes
    ----------
    outcome : Outcome
        As it came.
    answer : str, optional
        The text, if it belongs among the answers.
    value
        With a schema, what the text says; of a given answer, its log-likelihood.
    cells : tuple, optional
        The fields of a schema.
    """

    outcome: Outcome
    state: State
    finish_reason: str
    answer: str | None = None
    error: str | None = None
    value: Any = None
    cells: tuple[Any, ...] | None = None


def unanswered(outcome: Outcome, answer: str | None = None) -> Ending:
    """The end of a row that was skipped, failed or aborted."""
    reason = outcome.finish_reason
    return Ending(outcome, _UNANSWERED[reason], reason, answer, outcome.error)


def state_array(states: Sequence[str]) -> Any:
    """States as a category of all there are."""
    return column_array(states, _STATE)


class Form(Protocol):
    """How outcomes are read, and the columns they make."""

    @property
    def samples(self) -> int | None:
        """Answers a row; None for one."""
        ...

    @property
    def added(self) -> list[str] | None:
        """The columns beside the source's; None if the result stands alone."""
        ...

    def read(self, outcome: Outcome, params: SamplingParams) -> Ending:
        """What an outcome amounts to."""
        ...

    def frame(self, source: pd.DataFrame, endings: Sequence[Ending]) -> pd.DataFrame:
        """A row for each of the source's, or for each sample of it; `endings` sample by sample."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The result's columns.

    Parameters
    ----------
    answer, dtype
        Name and dtype of the answers' column.
    fields : tuple of Field
        The schema's; one called like another column has an underscore behind its name.
    parsed : bool
        A column of the schema's values, or of instances of the Pydantic model.
    samples : int, optional
        Answers a row; None for one without a number.
    shape : {"long", "wide"}
        A row for each sample, numbered in the column "sample"; or columns for each, its number behind their names.
    into : str, optional
        The answers alone, under this name, and their errors, with the source's columns.
    join : bool
        All columns, with the source's.
    """

    answer: str = "text"
    dtype: Dtype = "string"
    fields: tuple[Field, ...] = ()
    parsed: bool = False
    samples: int | None = None
    shape: Literal["long", "wide"] = "long"
    into: str | None = None
    join: bool = False

    @property
    def added(self) -> list[str] | None:
        """The columns beside the source's; None if the result stands alone."""
        return list(self.frame(pd.DataFrame(), ()).columns) if self.join or self.into else None

    def check(self, source: pd.DataFrame) -> None:
        """Refuse names that the source has already."""
        known = set(source.columns)
        taken = [repr(name) for name in self.added or () if _key(name, source) in known]
        if taken:
            hint = (
                "choose another name for into"
                if self.into
                else 'call the answers something else with into="…"'
            )
            raise RequestError(
                f"there {'is a column' if len(taken) == 1 else 'are columns'} {', '.join(taken)} already: "
                f"{hint}, or rename {'it' if len(taken) == 1 else 'them'}"
            )

    def read(self, outcome: Outcome, params: SamplingParams) -> Ending:
        """What a row's outcome amounts to."""
        # A choice that was cut off is in no category.
        text = None if isinstance(self.dtype, pd.CategoricalDtype) else outcome.text
        reason = outcome.finish_reason
        if not outcome.answered:
            return unanswered(outcome, text)
        if params.constraint is None:
            return Ending(outcome, "truncated" if reason == "length" else "done", reason, outcome.text)
        answer = read_structured(outcome.text or "", reason, params)
        if not answer.complete:
            what = "JSON" if params.schema is not None else "answer"
            why = "at max_tokens" if reason == "length" else "where it ended"
            return Ending(outcome, "truncated", reason, text, f"the {what} is cut off {why}")
        try:
            if answer.problem is not None:
                raise ValueError(answer.problem)
            plain = _plain(answer.value) if self.fields else None
            cells = tuple(field.value(plain) for field in self.fields)
        except Exception as error:  # a model class may refuse to be written as JSON
            return Ending(outcome, "failed", "stop", text, " ".join(str(error).split()))
        value = answer.value if params.schema is not None else None
        return Ending(outcome, "done", "stop", outcome.text, None, value, cells)

    def frame(self, source: pd.DataFrame, endings: Sequence[Ending]) -> pd.DataFrame:
        """A row for each of the source's, or for each sample of it; `endings` sample by sample."""
        index = source.index
        if self.samples is None:
            columns = self._columns(endings)
        elif self.shape == "long":
            numbers = pd.array(np.tile(np.arange(self.samples), len(source)), dtype="Int64")
            columns = {"sample": numbers, **self._columns(endings)}
            places = np.arange(len(source)).repeat(self.samples)
            index, source = index[places], source.iloc[places]
        else:
            columns = {
                f"{name}_{sample}": values
                for sample in range(self.samples)
                for name, values in self._columns(endings[sample :: self.samples]).items()
            }
        frame = source.copy() if self.join or self.into else pd.DataFrame(index=index)
        for name, values in columns.items():
            frame[_key(name, frame)] = pd.Series(
                values, index=index, dtype=values.dtype
            )  # or pandas makes text of objects
        return frame

    def _columns(self, endings: Sequence[Ending]) -> dict[str, Any]:
        answers = column_array([ending.answer for ending in endings], self.dtype)
        parsed = (
            {"parsed": column_array([ending.value for ending in endings], "object")} if self.parsed else {}
        )
        fields = {
            field.name: column_array(
                [ending.cells[i] if ending.cells else None for ending in endings], field.dtype
            )
            for i, field in enumerate(self.fields)
        }
        errors = pd.array([ending.error for ending in endings], dtype="string")
        if self.into is not None:
            return self._named(answers, parsed.get("parsed"), fields, errors)
        ours = {
            "state": state_array([ending.state for ending in endings]),
            "error": errors,
            "finish_reason": pd.array([ending.finish_reason for ending in endings], dtype="string"),
            **{
                name: pd.array([getattr(ending.outcome, name) for ending in endings], dtype="Int64")
                for name in _COUNTS
            },
            **{
                name: pd.array([getattr(ending.outcome, name) for ending in endings], dtype="Float64")
                for name in _SECONDS
            },
        }
        columns = {self.answer: answers, **parsed}
        for name, values in fields.items():
            columns[free_name(name, {"sample", *columns, *ours})] = values
        return columns | ours

    def _named(self, answers: Any, parsed: Any, fields: Mapping[str, Any], errors: Any) -> dict[str, Any]:
        name = self.into or ""
        if parsed is not None:
            return {name: parsed, f"{name}_error": errors}
        if not self.fields:
            return {name: answers, f"{name}_error": errors}
        if not self.fields[0].path:
            return {name: next(iter(fields.values())), f"{name}_error": errors}
        return {f"{name}.{field}": values for field, values in fields.items()} | {f"{name}_error": errors}


class Results:
    """Collects outcomes by position, in any order.

    Parameters
    ----------
    source : DataFrame
        The caller's.
    params : callable
        The parameters of the sample at a position.
    """

    def __init__(self, source: pd.DataFrame, layout: Form, params: Callable[[int], SamplingParams]) -> None:
        self._source, self._layout, self._params = source, layout, params
        total = len(source) * (layout.samples or 1)
        self._endings = [unanswered(_NEVER_RUN)] * total

    def record(self, position: int, outcome: Outcome) -> Outcome:
        """Take an outcome; the same as read: with structure, what doesn't fit has failed."""
        ending = self._endings[position] = self._layout.read(outcome, self._params(position))
        reason = _REASONS.get(ending.state, ending.finish_reason)
        if (reason, ending.error) == (outcome.finish_reason, outcome.error):
            return outcome
        return replace(outcome, finish_reason=reason, error=ending.error)

    def outcome(self, position: int) -> Outcome:
        """What was recorded there."""
        return self._endings[position].outcome

    def frame(self) -> pd.DataFrame:
        """The result; what has no outcome is "aborted"."""
        return self._layout.frame(self._source, self._endings)

    def counts(self) -> tuple[int, int]:
        """How many answers are finished, of how many."""
        return sum(ending.state != "aborted" for ending in self._endings), len(self._endings)


_REASONS = {"truncated": "length", "failed": "error"}
"""What a state is called among finish reasons."""
_UNANSWERED: dict[str, State] = {"skipped": "skipped", "error": "failed", "abort": "aborted"}


def _key(name: str, frame: pd.DataFrame) -> Any:
    """A column's label among columns of several levels too."""
    levels = frame.columns.nlevels
    return name if levels == 1 else (name, *[""] * (levels - 1))


def _plain(value: Any) -> Any:
    """JSON's values, from an instance of a Pydantic model too."""
    return value.model_dump(mode="json", by_alias=True) if hasattr(value, "model_dump") else value
