"""An answer that a server writes: text in pieces, already told apart, with its tokens only counted.

In place of a `Transcript` where the tokenizer is elsewhere. Stop strings are seen to here as well, since servers
differ in how exactly they keep to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..outputs import TokenLogprob
from ..request import Request
from .stops import StopFilter

__all__ = ["Received"]


class Received:
    """Append-only. Read and written by who holds the answer's reading lock.

    Parameters
    ----------
    limit : int
        Tokens that the answer may have; the server keeps to it.
    """

    __slots__ = ("_stops", "count", "limit", "mark", "reasoning", "text", "tokens", "tool_calls")

    logprobs: list[TokenLogprob] | None = None

    def __init__(self, request: Request, limit: int) -> None:
        self.limit = limit
        self.tokens: list[int] = []
        self.count = 0
        self.mark = 0
        """Pieces so far."""
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self._stops = StopFilter(request.params.stop or ())

    def write(self, answer: str, reasoning: str, tokens: int) -> bool:
        """Take what comes next; True if it completes a stop string."""
        self.mark += 1
        self.count += tokens
        self.reasoning += reasoning
        passed, stopped = self._stops.push(answer)
        self.text += passed
        return stopped

    def close(self, tool_calls: Sequence[dict[str, Any]], tokens: int | None) -> None:
        """Take the end as the server tells it; `tokens` is its own count, if it gives one."""
        self.read(self.mark, ended=True)
        self.tool_calls += tool_calls
        self.count = self.count if tokens is None else tokens

    def count_at(self, mark: int) -> int:  # noqa: ARG002 - all that there is may be read
        """Tokens that were read."""
        return self.count

    def read(self, mark: int, *, ended: bool) -> bool:  # noqa: ARG002
        """Let through what was held back, if nothing follows."""
        if ended:
            self.text += self._stops.flush()
        return False
