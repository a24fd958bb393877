"""The fields of a JSON schema as typed columns.

Owns which columns a schema makes, their dtypes, and whether a value fits its column. Knows no rows: what is wrong
with one value is told to whoever reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from ..validation import integer

__all__ = ["Dtype", "Field", "column_array", "fields_of", "free_name"]

Dtype = str | pd.CategoricalDtype
"""A nullable dtype, "object", or a category of an enum's values."""

WHOLE = "value"
"""The column of an answer that is no object: a list, say."""

_LEAVES = {"string": "string", "integer": "Int64", "number": "Float64", "boolean": "boolean"}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "Int64": (int, float),
    "Float64": (int, float),
    "boolean": (bool,),
}
_NAMES = {"string": "a text", "Int64": "a whole number", "Float64": "a number", "boolean": "true or false"}


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a schema: where its value is, and its dtype.

    Attributes
    ----------
    path : tuple of str
        Keys from the answer down to the value; none for the answer itself.
    """

    path: tuple[str, ...]
    dtype: Dtype

    @property
    def name(self) -> str:
        """The column's: the keys with dots between them."""
        return ".".join(self.path) or WHOLE

    def value(self, answer: Any) -> Any:
        """The column's value in an answer; None where it is null or left out, ValueError if it doesn't fit."""
        for key in self.path:
            answer = answer.get(key) if isinstance(answer, Mapping) else None
        if answer is None or self.dtype == "object":
            return answer
        if isinstance(self.dtype, pd.CategoricalDtype):
            if not any(answer == known for known in self.dtype.categories):
                raise ValueError(f"{self.name} must be one of {list(self.dtype.categories)}, got {answer!r}")
            return answer
        if not isinstance(answer, _TYPES[self.dtype]) or isinstance(answer, bool) != (
            self.dtype == "boolean"
        ):
            raise ValueError(f"{self.name} must be {_NAMES[self.dtype]}, got {answer!r}")
        if self.dtype == "Int64":
            whole = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
            return integer(self.name, whole, low=-(2**63), high=2**63 - 1)
        return answer


def fields_of(schema: Mapping[str, Any]) -> tuple[Field, ...]:
    """The columns of a JSON schema, in its order.

    Nested objects become several, with dots in their names. What can be of several types, lists, free mappings and
    schemas that contain themselves are objects.
    """
    return tuple(_Reader(schema).fields(schema, ()))


def column_array(values: Sequence[Any], dtype: Dtype) -> Any:
    """Values as an array of a dtype, None where there is none."""
    if isinstance(dtype, pd.CategoricalDtype):
        return pd.Categorical(values, dtype=dtype)
    if dtype == "object":
        array = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):  # at once, lists of one length would become one more dimension
            array[i] = value
        return array
    kind: Any = dtype
    return pd.array(values, dtype=kind)


def free_name(name: str, taken: Collection[str]) -> str:
    """A name that isn't taken: this one, or with underscores behind it."""
    while name in taken:
        name += "_"
    return name


class _Reader:
    """Walks a schema, following its references.

    Parameters
    ----------
    root : mapping
        What ``#/$defs/Name`` is looked up in.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def fields(
        self, schema: Mapping[str, Any], path: tuple[str, ...], inside: frozenset[str] = frozenset()
    ) -> Iterator[Field]:
        schema, inside = self._plain(schema, inside)
        properties = schema.get("properties")
        if schema.get("type", "object") == "object" and properties and "anyOf" not in schema:
            for name, inner in properties.items():
                yield from self.fields(inner if _is_schema(inner) else {}, (*path, name), inside)
        else:
            yield Field(path, self._dtype(schema))

    def _plain(
        self, schema: Mapping[str, Any], inside: frozenset[str]
    ) -> tuple[Mapping[str, Any], frozenset[str]]:
        """A schema without references, and without the null that it may also be."""
        while True:
            wrapped = _only([part for part in _alternatives(schema) if part.get("type") != "null"])
            reference = schema.get("$ref")
            if isinstance(reference, str):
                if reference in inside:
                    return {}, inside
                inside |= {reference}
                schema = self._lookup(reference)
            elif wrapped is not None:
                schema = wrapped
            else:
                return schema, inside

    def _lookup(self, reference: str) -> Mapping[str, Any]:
        found: Any = self._root
        for key in reference.removeprefix("#").split("/")[1:]:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if _is_schema(found) else None
        return found if _is_schema(found) else {}

    def _dtype(self, schema: Mapping[str, Any]) -> Dtype:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, Sequence):
            return _category([value for value in values if value is not None])
        kinds = schema.get("type")
        kinds = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds or ()) if kind != "null"]
        found = {_LEAVES.get(kind, "object") for kind in kinds}
        for part in _alternatives(schema):
            plain, _ = self._plain(part, frozenset())
            if plain.get("type") != "null":
                found.add(str(self._dtype(plain)))
        if found == {"Int64", "Float64"}:
            return "Float64"
        return found.pop() if len(found) == 1 and found <= set(_LEAVES.values()) else "object"


def _is_schema(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
    return [part for part in parts if _is_schema(part)]


def _only(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return parts[0] if len(parts) == 1 else None


def _category(values: Sequence[Any]) -> Dtype:
    if values and all(isinstance(value, bool) for value in values):
        return "boolean"
    # 1 and true are one value to pandas, and a list is none.
    if not values or not all(isinstance(v, Hashable) for v in values) or len(set(values)) < len(values):
        return "object"
    return pd.CategoricalDtype(list(values))
