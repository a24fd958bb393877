"""What is to be seen of an answer's tokens: probabilities, ranks, entropies, and their sums.

Owns the numbers of the token view. They are the model's own, before penalties, temperature and grammars.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from ..outputs import TokenLogprob
from .protocol import TokenFigures, TokenItem

__all__ = ["UNCERTAIN", "Answered", "Tokens", "item_of", "level", "likelier"]

UNCERTAIN = 0.3
"""A token below this probability is uncertain."""

_BREAKS = (0.9, 0.6, 0.3, 0.1)


class Answered(Protocol):
    """An answer, whole or so far: `RequestOutput`, `GenerationOutput` and the notebook's results are."""

    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None:
        """One a token, with their texts."""

    @property
    def finish_reason(self) -> str | None:
        """None while it goes on."""


class Tokens:
    """The tokens of an answer that grows, and their figures."""

    def __init__(self) -> None:
        self.items: list[TokenItem] = []
        self._seen = 0
        self._p = self._logprob = self._bits = self._max_bits = 0.0

    def take(self, logprobs: Sequence[TokenLogprob]) -> int:
        """Take what is new up to the first token that isn't decided; how many there were before."""
        before = len(self.items)
        while self._seen < len(logprobs) and logprobs[self._seen].part is not None:
            token = logprobs[self._seen]
            self._seen += 1
            if token.part != "stop":
                self._add(token)
        return before

    def _add(self, token: TokenLogprob) -> None:
        item = item_of(token)
        self.items.append(item)
        self._p += math.exp(token.logprob)
        self._logprob += token.logprob
        self._bits += item["bits"]
        self._max_bits = max(self._max_bits, item["bits"])

    @property
    def figures(self) -> TokenFigures:
        """Of all tokens so far."""
        count = len(self.items)
        if not count:
            return {"mean": None, "perplexity": None, "mean_bits": None, "max_bits": None}
        mean = self._logprob / count
        return {
            "mean": round(self._p / count, 6),
            "perplexity": round(math.exp(-mean), 4) if mean > -700 else None,
            "mean_bits": round(self._bits / count, 4),
            "max_bits": self._max_bits,
        }


def item_of(token: TokenLogprob) -> TokenItem:
    """Return one token as it is shown."""
    assert token.part not in (None, "stop")
    p = math.exp(token.logprob)
    # Of tokens that are equally likely the chosen one is the first: none was likelier.
    order = sorted(token.top.items(), key=lambda entry: (-entry[1], entry[0] != token.token_id))
    ids = [token_id for token_id, _ in order]
    known = [math.exp(logprob) for logprob in token.top.values()]
    if token.token_id not in token.top:
        known.append(p)
    return {
        "text": token.text,
        "part": token.part,  # type: ignore[typeddict-item]
        "p": round(p, 6),
        "rank": ids.index(token.token_id) + 1 if token.token_id in token.top else None,
        "bits": round(_bits([*known, max(0.0, 1 - sum(known))]), 4),
        "top": [
            {"text": _legible(token.top_texts.get(token_id, ""), token_id), "p": round(math.exp(logprob), 6)}
            for token_id, logprob in order
        ],
    }


def _bits(shares: Iterable[float]) -> float:
    """The entropy of a distribution. What isn't known counts as one outcome, so the true one is no lower."""
    return -sum(share * math.log2(share) for share in shares if share > 0) + 0.0


def _legible(text: str, token_id: int) -> str:
    """Tokens that are bytes of a character look the same, and some have no text: their number tells them apart."""
    return text if text and "\ufffd" not in text else f"{text} #{token_id}".lstrip()


def level(p: float) -> int:
    """Return the step of shading: 0 from 90 %, then 60, 30, 10, and 4 below."""
    return next((step for step, least in enumerate(_BREAKS) if p >= least), len(_BREAKS))


def likelier(item: TokenItem) -> bool:
    """Whether another token was likelier, as far as that is known."""
    return bool(item["top"]) and item["rank"] != 1
