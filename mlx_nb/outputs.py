"""What comes back from an engine. Plain Python values only: no arrays, no tokenizer, no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["GenerationOutput", "LoadProgress", "RequestOutput", "TokenLogprob", "TokenPart"]

TokenPart = Literal["answer", "reasoning", "tool", "marker", "stop"]
"""What a token's text is part of; markers and stop strings are in no text."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a chosen token, and what it wrote.

    Attributes
    ----------
    top : dict of int to float
        The likeliest tokens in its place and their log-probabilities, likeliest first.
    text : str
        Empty for a token that ends within a character: the text is that of the token which completes it. The
        texts of all answer tokens join to the answer, those of the reasoning to the reasoning.
    part : {"answer", "reasoning", "tool", "marker", "stop"} or None
        None while it is not decided, since the text may be the beginning of a marker or a stop string.
    top_texts : dict of int to str
        What each token of `top` would have written.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)
    text: str = ""
    part: TokenPart | None = None
    top_texts: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class RequestOutput:
    """A step in a request's answer: what is new, and all there is so far.

    Attributes
    ----------
    new_token_ids, new_text
        Since the previous output of the same stream. Texts join to `output_text` exactly.
    new_reasoning, reasoning : str
        The model's thinking, told apart from the answer; it is in neither text.
    tool_calls : list of dict
        ``{"name": …, "arguments": …}``; a block that is no valid call stays in the text.
    finish_reason : {"stop", "length", "abort", "error", "tool_calls"} or None
    prompt_tokens, completion_tokens, cached_tokens : int
        `cached_tokens` of the prompt came from the prefix cache.
    mtp_drafts, mtp_accepted : int
        Tokens proposed and accepted by speculation.
    logprobs : list of TokenLogprob or None
        One per output token, when asked for.
    error : BaseException or None
        What ended the request, with ``finish_reason == "error"``.
    """

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    output_text: str = ""
    finished: bool = False
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    mtp_drafts: int = 0
    mtp_accepted: int = 0
    logprobs: list[TokenLogprob] | None = None
    error: BaseException | None = None
    new_reasoning: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts under the names of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(slots=True)
class GenerationOutput:
    """An answer, whole or so far, as SimpleEngine and the notebook give it. Printed and displayed it is its text.

    `timings` holds seconds: ``queue_s``, ``ttft_s`` (time to first token) and ``total_s``. `turns_left_out` counts
    the oldest turns of a conversation that the context had no room for.
    """

    text: str
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    mtp_drafts: int = 0
    mtp_accepted: int = 0
    new_text: str = ""
    finished: bool = False
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    parsed: Any = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    turns_left_out: int = 0

    def __str__(self) -> str:
        return self.text

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython gives it
        printer.text(self.text or repr(self))


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a model's loading is.

    `stage` is "resolve", "download", "convert", "load" or "ready"; `fraction` is 0 to 1, or None where it can't
    be known.
    """

    stage: str
    message: str
    fraction: float | None = None
