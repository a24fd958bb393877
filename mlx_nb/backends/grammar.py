"""Structured output: which tokens a schema, regex, list of choices or Lark grammar allows next.

llguidance does the matching; the mask is applied with plain array operations, so that it works on every device.
With a model that thinks, the grammar begins after the thinking.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..sampling import SamplingParams
from .text import TokenizerCodec

__all__ = ["Constraint", "Grammars", "grammar_source"]

# Free white space between JSON's parts lets a model wander in it up to max_tokens.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_NO_FORCING = '%llguidance {"no_forcing": true}'


def grammar_source(params: SamplingParams) -> str:
    """The constraint as llguidance reads it.

    Raises
    ------
    RequestError
        One line that says what is wrong with it.
    """
    from llguidance import LLMatcher

    kind = params.constraint
    try:
        if kind == "schema":
            source = LLMatcher.grammar_from_json_schema(json.dumps(params.json_schema), defaults=_JSON)
        elif kind == "regex":
            source = LLMatcher.grammar_from_regex(params.regex or "")
        elif kind == "choices":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choices or ())
            source = LLMatcher.grammar_from_lark(f"start: {choices}")
        else:
            source = LLMatcher.grammar_from_lark(params.grammar or "")
        problem = LLMatcher.validate_grammar(source)
    except (ValueError, TypeError) as error:
        problem = str(error)
    if problem:
        raise RequestError(f"{kind} can't be used: {' '.join(problem.split())[:300]}")
    return str(source)


class Grammars:
    """Makes constraints for one tokenizer. Its vocabulary is indexed at the first use, about a second."""

    def __init__(self, codec: TokenizerCodec) -> None:
        self._codec = codec
        self._lock = threading.Lock()

    @functools.cached_property
    def _vocabulary(self) -> Any:
        import llguidance.hf

        tokenizer = self._codec.chat_tokenizer._tokenizer
        return llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=self._codec.vocabulary_size, eos_token=sorted(self._codec.eos_token_ids)
        )

    def constraint(self, params: SamplingParams, prompt: Sequence[int]) -> Constraint:
        """A fresh one for one answer."""
        from llguidance import LLMatcher

        source = grammar_source(params)
        if any(token in source for token in self._codec.chat_tokenizer.get_added_vocab()):
            source = _unforced(source)
        with self._lock:
            matcher = LLMatcher(self._vocabulary, source)
        if matcher.is_error():
            raise RequestError(
                f"{params.constraint} can't be used: {' '.join(matcher.get_error().split())[:300]}"
            )
        tokenizer = self._codec.chat_tokenizer
        if not tokenizer.has_thinking or params.thinking is False:
            return Constraint(matcher, self._codec.vocabulary_size)
        return Constraint(
            matcher,
            self._codec.vocabulary_size,
            think_start=tuple(tokenizer.think_start_tokens),
            think_end=tokenizer.think_end,
            thinking=self._codec.opens_thinking(prompt),
            decode=self._codec.decode,
        )


def _unforced(source: str) -> str:
    """The same grammar without a short cut: text that is fixed would be put into tokens at once.

    Where it reads like one of the tokenizer's own tokens (``<think>``), that token would be taken, and then refused.
    """
    if not source.startswith("{"):
        return f"{_NO_FORCING}\n{source}"
    described = json.loads(source)
    for part in described["grammars"]:
        lark = part["lark_grammar"] or f"start: %json {json.dumps(part.pop('json_schema'))}"
        part["lark_grammar"] = f"{_NO_FORCING}\n{lark}"
    return json.dumps(described)


class Constraint:
    """One answer's way through a grammar.

    Parameters
    ----------
    matcher : llguidance.LLMatcher
    vocabulary_size : int
    think_start : tuple of int
        Tokens that open the thinking, in which everything is allowed.
    think_end : str
        What closes it, in whatever tokens.
    thinking : bool
        Whether the prompt opened it.
    decode : callable
        Tokens to text.
    """

    def __init__(
        self,
        matcher: Any,
        vocabulary_size: int,
        *,
        think_start: tuple[int, ...] = (),
        think_end: str = "",
        thinking: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._matcher = matcher
        self._bits: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(
            (1, (vocabulary_size + 31) // 32), np.int32
        )
        self._think_start, self._think_end = think_start, think_end
        self._thinking = thinking
        self._decode = decode
        self._tail: list[int] = []
        self._begun = False

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token."""
        if self._thinking:
            assert self._decode is not None
            self._tail = [*self._tail, token_id][-len(self._think_end) :]
            self._thinking = self._think_end not in self._decode(self._tail)
        elif not self._begun and self._may_think(token_id):
            self._thinking = True
        elif not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            raise RequestError(f"the grammar failed: {self._matcher.get_error().splitlines()[0]}")
        self._begun = True

    def _may_think(self, token_id: int | None = None) -> bool:
        """Whether a thinking block may begin here: with the first token, where one token opens it."""
        return not self._begun and len(self._think_start) == 1 and token_id in (None, self._think_start[0])

    def mask(self, logits: mx.array) -> mx.array:
        """Logits, shape (1, vocabulary), with what is not allowed next at minus infinity."""
        import llguidance.numpy

        if self._thinking:
            return logits
        # Once the grammar is complete, this allows the end of the answer alone.
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._may_think():
            word, bit = divmod(self._think_start[0], 32)
            self._bits.view(np.uint32)[0, word] |= np.uint32(1 << bit)
        size = logits.shape[-1]
        bits = mx.array(self._bits.view(np.uint32)).reshape(-1, 1) >> mx.arange(32, dtype=mx.uint32)
        allowed = (bits & 1).reshape(1, -1)[:, :size].astype(mx.bool_)
        if allowed.shape[-1] < size:
            allowed = mx.pad(allowed, [(0, 0), (0, size - allowed.shape[-1])])
        return mx.where(allowed, logits, -mx.inf)
