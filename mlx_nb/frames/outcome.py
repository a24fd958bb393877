"""What a row asks of the engine, and how it ended: plain values that job, store and results hand each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.intake import Prompt
from ..errors import MlxNbError
from ..outputs import RequestOutput, TokenLogprob
from ..sampling import SamplingParams

if TYPE_CHECKING:
    from ..prompts.media import Picture

__all__ = ["Ask", "Outcome", "Skipped"]

ANSWERED = frozenset({"stop", "length", "tool_calls"})


class Skipped(Exception):
    """A row that holds no prompt; the message says why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a row asks of the engine; `text` is shown while it runs."""

    prompt: Prompt
    text: str
    params: SamplingParams
    images: Sequence[Picture] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a row ended. `finish_reason` is the engine's, or "skipped"; times are in seconds since it was submitted.

    A row that shares another's answer has that one's counts and times.
    """

    finish_reason: str
    text: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    logprobs: list[TokenLogprob] | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Outcome:
        """That of a row the engine had."""
        aborted = output.finish_reason == "abort"
        unfinished = aborted or output.error is not None
        times = output.timings
        return cls(
            finish_reason=output.finish_reason or "error",
            text=(output.output_text or None) if unfinished else output.output_text,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            error="aborted before it was finished" if aborted else _line(output.error),
            reasoning=output.reasoning or None,
            tool_calls=output.tool_calls or None,
            logprobs=output.logprobs,
            queue_s=times.get("queue_s"),
            ttft_s=times.get("ttft_s"),
            total_s=times.get("total_s"),
        )

    @classmethod
    def failed(cls, error: Exception) -> Outcome:
        """That of a row the engine never took."""
        return cls("error", error=_line(error))

    @property
    def timings(self) -> dict[str, float]:
        """``queue_s``, ``ttft_s`` and ``total_s``, as far as they are known."""
        known = {"queue_s": self.queue_s, "ttft_s": self.ttft_s, "total_s": self.total_s}
        return {name: seconds for name, seconds in known.items() if seconds is not None}

    @property
    def answered(self) -> bool:
        """Whether the model came to an end of its own, or to max_tokens."""
        return self.finish_reason in ANSWERED


def _line(error: Any) -> str | None:
    if error is None:
        return None
    text = " ".join(str(error).split())
    if isinstance(error, MlxNbError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
