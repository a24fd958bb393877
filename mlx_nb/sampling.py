"""What a request asks of its tokens: length, randomness, penalties, constraints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .validation import between, flag, integer, number, several

__all__ = ["LogitsProcessor", "SamplingParams"]

_CONSTRAINTS = ("schema", "regex", "choices", "grammar")

LogitsProcessor = Callable[[Any, Any], Any]
"""``processor(tokens, logits) -> logits``, as in mlx-lm.

`tokens` is an int array of the row's tokens so far (prompt and output), `logits` has shape (1, vocabulary).
"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    They act in this order: logit_bias, penalties, processors, temperature, top_k, top_p, min_p, draw.

    Parameters
    ----------
    max_tokens : int
        Upper bound of new tokens; 0 gives an empty result.
    temperature : float
        0 is greedy.
    top_p, top_k, min_p
        Nucleus (0 to 1], candidates (0 means all), floor relative to the likeliest token [0, 1].
    presence_penalty, frequency_penalty : float
        -2 to 2, over the output only.
    repetition_penalty : float
        Above 0, 1 means none; over prompt and output.
    repetition_window : int, optional
        Last tokens that repetition_penalty looks at; None means all.
    stop : str or sequence of str, optional
        Texts that end the answer; never part of it.
    stop_token_ids : sequence of int, optional
        Tokens that end the answer, beside the model's own.
    seed : int, optional
        Same seed and prompt, same text, whatever runs beside it. None draws a fresh one.
    logprobs : int, optional
        Log-probabilities of the chosen token and of that many alternatives (0 to 64); the model's own, before
        penalties and temperature.
    logit_bias : mapping of int to float, optional
        Added to the logits of those tokens.
    schema, regex, choices, grammar
        Structured output, at most one of them: a JSON schema (dict, JSON text or Pydantic model), a regular
        expression, a list of texts, a Lark grammar. With a model that thinks it begins after the thinking.
    logits_processors : sequence of callable, optional
        See `LogitsProcessor`. One that raises ends its own request only.
    ignore_eos : bool
        Go on to max_tokens.
    thinking : bool, optional
        Passed to the chat template; None leaves it to the template.
    """

    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    schema: Any = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    ignore_eos: bool = False
    thinking: bool | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        flag("ignore_eos", self.ignore_eos)
        if self.thinking is not None:
            flag("thinking", self.thinking)
        self._copy_collections()
        self._check_constraint()

    def _check_numbers(self) -> None:
        integer("max_tokens", self.max_tokens, low=0)
        number("temperature", self.temperature, low=0)
        if not 0 < number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        integer("top_k", self.top_k, low=0)
        between("min_p", self.min_p, 0, 1)
        between("presence_penalty", self.presence_penalty, -2, 2)
        between("frequency_penalty", self.frequency_penalty, -2, 2)
        if not number("repetition_penalty", self.repetition_penalty) > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if self.repetition_window is not None:
            integer("repetition_window", self.repetition_window, low=1)
        if self.seed is not None:
            integer("seed", self.seed, low=0, high=2**64 - 1)
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, low=0, high=64)

    def _copy_collections(self) -> None:
        """Keep copies, so that what was validated can't change later."""
        self._set("stop", _stop_strings(self.stop))
        ids = tuple(
            integer("stop_token_ids", i, low=0) for i in several("stop_token_ids", self.stop_token_ids)
        )
        self._set("stop_token_ids", ids)
        self._set("logits_processors", _callables(self.logits_processors))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            bias = {
                integer("logit_bias token", token, low=0): number("logit_bias value", value)
                for token, value in self.logit_bias.items()
            }
            self._set("logit_bias", bias)
        if self.choices is not None:
            self._set("choices", _choices(self.choices))

    def _check_constraint(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one")
        if given and self.ignore_eos:
            raise ValueError(f"ignore_eos can't go with {given[0]}: its answer ends where it is complete")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{name} must be a non-empty text, got {value!r}")
        if self.schema is not None:
            _json_schema(self.schema)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def constraint(self) -> str | None:
        """Name of the structured-output field in use, if any."""
        return next((name for name in _CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """`schema` as a JSON schema."""
        return None if self.schema is None else _json_schema(self.schema)

    def but(self, **changes: Any) -> SamplingParams:
        """Copy with some fields changed; an unknown name raises ValueError."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"unknown sampling parameter {name!r}; known are {', '.join(sorted(known))}")
        return replace(self, **changes)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else several("stop", stop)
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop must be a non-empty text or several, got {stop!r}")
    return strings


def _callables(processors: Sequence[LogitsProcessor] | None) -> tuple[LogitsProcessor, ...]:
    found = several("logits_processors", processors)
    if not all(callable(p) for p in found):
        raise ValueError("logits_processors must be functions of (tokens, logits)")
    return found


def _json_schema(schema: Any) -> dict[str, Any]:
    """From a dict, JSON text, or a Pydantic model (by its ``model_json_schema``)."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    elif isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(
            f"schema must be a JSON schema (dict or JSON text) or a Pydantic model, got {schema!r}"
        )
    return schema


def _choices(choices: Sequence[str]) -> tuple[str, ...]:
    texts = several("choices", choices)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"choices must be a list of non-empty texts, got {choices!r}")
    return texts
