"""Outcomes in the order of the caller's rows, and the DataFrame they make."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from .job import Outcome

__all__ = ["GenerationCancelled", "GenerationInterrupted", "Results"]

DTYPES: dict[str, Any] = {
    "text": "string",
    "finish_reason": "string",
    "prompt_tokens": "Int64",
    "completion_tokens": "Int64",
    "cached_tokens": "Int64",
    "error": "string",
}
"""The result's columns."""

_NEVER_RUN = Outcome("abort", error="aborted before it was started")


class GenerationInterrupted(KeyboardInterrupt):
    """A job was interrupted. `partial` is its DataFrame: finished rows as they are, the others "abort"."""

    def __init__(self, partial: pd.DataFrame) -> None:
        done = int((partial["finish_reason"] != "abort").sum())
        super().__init__(f"{done:,} of {len(partial):,} rows are finished: see .partial")
        self.partial = partial


class GenerationCancelled(asyncio.CancelledError):
    """An awaited job was cancelled. `partial` is as in `GenerationInterrupted`."""

    def __init__(self, partial: pd.DataFrame) -> None:
        super().__init__()
        self.partial = partial


class Results:
    """Collects outcomes by position, in any order, and shows how far they are. A context manager.

    Parameters
    ----------
    index : Index
        The caller's; the result carries it.
    progress : bool
        Show a bar.
    """

    def __init__(self, index: pd.Index, *, progress: bool) -> None:
        self._index = index
        self._outcomes: list[Outcome] = [_NEVER_RUN] * len(index)
        self._failed = 0
        self._bar: Any = tqdm(total=len(index), unit="row", disable=not progress)

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def record(self, position: int, outcome: Outcome) -> None:
        """Take a row's outcome."""
        self._outcomes[position] = outcome
        if outcome.finish_reason == "error":
            self._failed += 1
            self._bar.set_postfix(failed=self._failed, refresh=False)
        if outcome.finish_reason != "abort":
            self._bar.update()

    def frame(self) -> pd.DataFrame:
        """A row for each of the caller's; those without an outcome are "abort"."""
        return pd.DataFrame(
            {
                name: pd.array([getattr(outcome, name) for outcome in self._outcomes], dtype=dtype)
                for name, dtype in DTYPES.items()
            },
            index=self._index,
        )
