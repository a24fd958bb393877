"""From a Series or DataFrame and a template to one prompt a row.

Everything that can be wrong with the call as a whole is refused here, before anything is generated. What is wrong
with one row (a null, an empty text, an expression that fails) concerns that row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import jinja2
import pandas as pd

from ..errors import RequestError, TemplateError
from ..prompts.template import Template
from .job import Skipped

__all__ = ["Rows", "text_objection"]

FUNCTIONS = frozenset({"float", "int", "len", "range", "round", "str"})
"""Python's own that a template may call. Not all of them: a missing column named "input" or "id" must be noticed."""

_TEXT_KINDS = frozenset({"string", "empty", "mixed", "mixed-integer"})


class Rows:
    """The prompts of a frame, row by row.

    Parameters
    ----------
    data : Series or DataFrame
        A Series is a frame of one column, under its name if a template can spell it, or else "text".
    template : str, optional
        None, for a Series only: each text is the prompt.

    Raises
    ------
    RequestError
        For data of another type.
    TemplateError
        For a template that doesn't parse, names no column or one that isn't there.
    """

    def __init__(self, data: pd.DataFrame | pd.Series, template: str | None = None) -> None:
        if isinstance(data, pd.Series):
            if objection := text_objection(data):
                raise RequestError(objection)
            name = _spelling(data.name)
            columns = {name: data}
            template = f"{{{{ {name} }}}}" if template is None else template
        elif isinstance(data, pd.DataFrame):
            columns = {name: data[name] for name in data.columns if isinstance(name, str)}
        else:
            raise RequestError(f"a DataFrame or a Series is needed, got {type(data).__name__}")
        self.index = data.index
        self._template = _template(template, columns)
        self._columns = {
            name: _single(name, columns[name]) for name in sorted(self._template.names & set(columns))
        }

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """The values of each row that the template uses, made as they are asked for."""
        names = list(self._columns)
        nulls = zip(*(column.isna().to_numpy(dtype=bool) for column in self._columns.values()), strict=True)
        for values, null in zip(zip(*self._columns.values(), strict=True), nulls, strict=True):
            yield {
                name: _cell(name, value, gone) for name, value, gone in zip(names, values, null, strict=True)
            }

    def prompt(self, values: Mapping[str, Any]) -> str:
        """The prompt of a row. Raises Skipped if there is none, TemplateError if an expression fails."""
        try:
            prompt = self._template.render(values)
        except TemplateError as error:
            if isinstance(error.__cause__, _Missing):
                raise Skipped(str(error.__cause__)) from None
            raise
        if not prompt.strip():
            raise Skipped("the prompt is empty")
        return prompt


class _Missing(jinja2.UndefinedError):
    """A template printed, or computed with, a value that isn't there."""


class _Gap(jinja2.Undefined):
    """A null or empty cell: false in a condition, filled by ``default``; printing it raises _Missing."""

    __slots__ = ()

    def __str__(self) -> str:
        raise _Missing(self._undefined_message)


def text_objection(series: pd.Series) -> str | None:
    """Why a Series holds no text, or None if it may."""
    dtype = series.dtype
    held = dtype.categories if isinstance(dtype, pd.CategoricalDtype) else series
    if pd.api.types.is_object_dtype(held.dtype):
        kind = pd.api.types.infer_dtype(held, skipna=True)
        fine = kind in _TEXT_KINDS
    else:
        kind = str(held.dtype)
        fine = pd.api.types.is_string_dtype(held.dtype)
    if fine:
        return None
    name = "the Series" if series.name is None else f"column {series.name!r}"
    return f"{name} holds no text ({kind}): convert it with .astype('string') first"


def _spelling(name: object) -> str:
    return name if _is_spelled(name) else "text"


def _is_spelled(name: object) -> TypeGuard[str]:
    """Whether a template can call a column by this name: not "my column", nor "not", nor "none"."""
    if not isinstance(name, str) or not name.isidentifier():
        return False
    try:
        return name in Template(f"{{{{ {name} }}}}").names
    except TemplateError:
        return False


def _template(text: str | None, columns: Mapping[str, object]) -> Template:
    if not isinstance(text, str):
        raise TemplateError(f"a template is a text with columns as {{{{ name }}}}, got {type(text).__name__}")
    template = Template(text, blocks=True)
    template.require(columns, kind="column")
    for name in sorted(template.names - set(columns) - FUNCTIONS):
        raise TemplateError(f"the prompt uses {{{{ {name} }}}}, and there is no column {name!r}")
    if not template.names & set(columns):
        example = next(filter(_is_spelled, columns), "name")
        raise TemplateError(
            f"the template names no column, so that all rows would be alike: write {{{{ {example} }}}} "
            "where the column's value belongs"
        )
    return template


def _single(name: str, column: pd.Series | pd.DataFrame) -> pd.Series:
    if isinstance(column, pd.DataFrame):
        raise TemplateError(f"there are {column.shape[1]} columns {name!r}: rename all but one")
    return column


def _cell(name: str, value: Any, null: bool) -> Any:
    if null:
        return _Gap(hint=f"{name!r} is null", exc=_Missing)
    if isinstance(value, str) and not value.strip():
        return _Gap(hint=f"{name!r} is empty", exc=_Missing)
    return value
