"""What a structured answer holds, and whether it is complete.

Owns the way from an answer's text to its value. Refuses to guess: what was cut off has no value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..sampling import SamplingParams

__all__ = ["Structured", "read_structured"]


@dataclass(frozen=True, slots=True)
class Structured:
    """The value of an answer.

    Attributes
    ----------
    complete : bool
        Whether all of it is there. Without, there is no value.
    value
        Of a schema the JSON, or an instance of the Pydantic model; else the text.
    problem : str, optional
        Why the model class refuses an answer that is complete.
    """

    complete: bool
    value: Any = None
    problem: str | None = None


_CUT_OFF = Structured(complete=False)
_CLOSED = ("}", "]", '"', "true", "false", "null")
"""What JSON ends with when nothing can follow."""


def read_structured(text: str, finish_reason: str | None, params: SamplingParams) -> Structured:
    """Read an answer to `params`, which constrain it.

    An answer that became complete with its last permitted token is complete, though it ended with "length".
    """
    if finish_reason not in ("stop", "length"):
        return _CUT_OFF
    capped = finish_reason == "length"
    if params.schema is not None:
        # Of 123 there may be more: 12345.
        return _CUT_OFF if capped and not text.rstrip().endswith(_CLOSED) else _read_json(text, params.schema)
    return _CUT_OFF if capped and not _is_final_choice(text, params) else Structured(True, text)


def _read_json(text: str, schema: Any) -> Structured:
    try:
        value = json.loads(text)
    except ValueError:  # cut off, by a stop string too
        return _CUT_OFF
    if not hasattr(schema, "model_validate_json"):
        return Structured(True, value)
    try:
        return Structured(True, schema.model_validate_json(text))
    except Exception as error:  # the class's own checks may raise anything
        return Structured(True, problem=_problem(error))


def _problem(error: Exception) -> str:
    """One line: of Pydantic's errors the fields and what is wrong with them."""
    try:
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]  # type: ignore[attr-defined]
        text = "; ".join(f"{place}: {message}" if place else message for place, message in found)
    except Exception:  # none of Pydantic's
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def _is_final_choice(text: str, params: SamplingParams) -> bool:
    """Whether the text is one of the choices, and the beginning of no other."""
    choices = params.choices or ()
    return text in choices and not any(other != text and other.startswith(text) for other in choices)
