"""What a contender is asked, what it answers, and the figures that come out of it. Plain values; no dependency."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text and as the very tokens that text has."""

    text: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a piece of work.

    Attributes
    ----------
    new : int
        Tokens to make, greedily and never fewer.
    at : float
        Seconds after the beginning at which it arrives.
    leaves : float, optional
        Seconds after the beginning at which it is aborted.
    with_last : bool
        It is aborted when the last request of the work has ended.
    streams : bool
        Whether each token is wanted as soon as it is made; else only the whole answer.
    """

    prompt: Prompt
    new: int
    at: float = 0.0
    leaves: float | None = None
    with_last: bool = False
    streams: bool = True

    def plain(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return asdict(self)

    @classmethod
    def read(cls, plain: dict[str, Any]) -> "Ask":
        """Take what `plain` returned."""
        return cls(**{**plain, "prompt": Prompt(**plain["prompt"])})


@dataclass(slots=True)
class Answer:
    """What became of an `Ask`; times are seconds after the beginning of the work.

    Attributes
    ----------
    made : int
        Tokens.
    ids : list of int, optional
        None from a contender that gives text only.
    times : list of float
        When each token (or piece of text) arrived; empty unless it was streamed.
    """

    made: int = 0
    end: float = 0.0
    ids: list[int] | None = None
    text: str | None = None
    times: list[float] = field(default_factory=list)


def tokens_a_second(answers: Sequence[Answer]) -> float:
    """Return the throughput from the beginning to the last answer's end."""
    return sum(answer.made for answer in answers) / max(answer.end for answer in answers)


def first_tokens(asks: Sequence[Ask], answers: Sequence[Answer]) -> list[float]:
    """Return the seconds from each arrival to its first token."""
    return [answer.times[0] - ask.at for ask, answer in zip(asks, answers, strict=True)]


def gaps(answers: Iterable[Answer], since: float = 0.0, until: float = float("inf")) -> list[float]:
    """Return the seconds between neighbouring tokens, of those gaps that touch the time between two moments."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.times, answer.times[1:], strict=False)
        if since < later and earlier < until
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so many percent of all do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * share / 100) - 1)]


def same(answers: Sequence[Answer], reference: Sequence[Answer]) -> int:
    """Return how many answers equal the reference's: by tokens, or by text from contenders that give no more."""
    return sum(_equal(one, two) for one, two in zip(answers, reference, strict=True))


def _equal(one: Answer, two: Answer) -> bool:
    if one.ids is not None and two.ids is not None:
        return one.ids == two.ids
    return (one.text or "").strip() == (two.text or "").strip()
