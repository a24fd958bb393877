"""From a Series or DataFrame and a template to one prompt a row.

Everything that can be wrong with the call as a whole is refused here, before anything is generated. What is wrong
with one row (a null, an empty text, an expression that fails) concerns that row alone.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import jinja2
import pandas as pd

from ..errors import RequestError, TemplateError
from ..prompts.chat import Message
from ..prompts.template import Template
from .outcome import Skipped

__all__ = ["Cells", "Rows", "template_name", "text_objection"]

Cells = Mapping[Hashable, Any]
"""A row's values by column, of those columns that are needed. A null or empty one is a `jinja2.Undefined`."""

FUNCTIONS = frozenset({"float", "int", "len", "range", "round", "str"})
"""Python's own that a template may call. Not all of them: a missing column named "input" or "id" must be noticed."""

ROW = "row"
"""In a template ``row["my column"]`` is a column of any name, unless one is called "row" itself."""

_TEXT_KINDS = frozenset({"string", "empty", "mixed", "mixed-integer"})


class Rows:
    """The prompts of a frame, row by row.

    Parameters
    ----------
    data : Series or DataFrame
        A Series is a frame of one column, under its name if a template can spell it, or else "text".
    template : str, optional
        None for a Series, each of whose texts is a prompt then, or with `messages`.
    system : str, optional
        The system prompt; a template as well.
    messages : hashable, optional
        The column that holds each row's chat messages, in place of a template.
    images : hashable, optional
        The column that holds each row's image or images.
    also : collection of hashable
        Further columns that are needed.

    Raises
    ------
    RequestError
        For data of another type.
    TemplateError
        For a template that doesn't parse, names no column or one that isn't there.

    Attributes
    ----------
    source : DataFrame
        The data as a frame, with its index.
    """

    def __init__(
        self,
        data: pd.DataFrame | pd.Series,
        template: str | None = None,
        *,
        system: str | None = None,
        messages: Hashable = None,
        images: Hashable = None,
        also: Collection[Hashable] = (),
    ) -> None:
        self.source, name = _frame(data)
        if messages is not None and template is not None:
            raise RequestError("messages are whole conversations: leave the template out, or messages")
        if messages is not None and system is not None:
            raise RequestError("with messages the system prompt is one of them: leave system out")
        if template is None and messages is None and isinstance(data, pd.Series):
            template = f"{{{{ {name} }}}}"
        self._columns = _Columns(self.source, alias=name)
        self._template = None if messages is not None else self._read(template)
        self._system = None if system is None else self._read(system)
        self._messages, self._images = messages, images
        for label in (*also, *(label for label in (messages, images) if label is not None)):
            self._columns.need(label)
        if not self._columns.needed:
            example = next(filter(_is_spelled, self._columns.labels), "name")
            raise TemplateError(
                f"the template names no column, so that all rows would be alike: write {{{{ {example} }}}} "
                "where the column's value belongs"
            )

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Cells]:
        """The values of each row that are needed, made as they are asked for."""
        return iter(self._columns)

    def prompt(self, cells: Cells) -> str | list[Message]:
        """The prompt of a row, or its messages.

        Raises Skipped if there is none, TemplateError if an expression fails, RequestError for bad messages.
        """
        if self._template is None:
            return _conversation(cells[self._messages])
        prompt = _rendered(self._template, cells)
        if not prompt.strip():
            raise Skipped("the prompt is empty")
        return prompt

    @property
    def needed(self) -> list[Hashable]:
        """The columns that are read."""
        return list(self._columns.needed)

    @property
    def has_images(self) -> bool:
        """Whether rows may bring images."""
        return self._images is not None

    def images(self, cells: Cells) -> list[Any]:
        """What a row's images are made of."""
        cell = cells[self._images] if self.has_images else None
        several = cell if isinstance(cell, list | tuple) else [cell]
        return [each for each in several if not _is_none(each)]

    def system(self, cells: Cells) -> str | None:
        """The system prompt of a row; as `prompt`."""
        return None if self._system is None else _rendered(self._system, cells)

    def _read(self, text: str | None) -> Template:
        if not isinstance(text, str):
            raise TemplateError(
                f"a template is a text with columns as {{{{ name }}}}, got {type(text).__name__}"
            )
        template = Template(text, blocks=True)
        names = self._columns.names
        template.require({*names, ROW}, kind="column")
        for name in sorted(template.names - names - FUNCTIONS - {ROW}):
            raise TemplateError(f"the prompt uses {{{{ {name} }}}}, and there is no column {name!r}")
        for name in sorted(template.names & names):
            self._columns.need(name)
        if ROW in template.names - names:
            keys = template.keys(ROW)
            for label in self._columns.labels if keys is None else sorted(keys, key=str):
                self._columns.need(label)
            self._columns.whole = True
        return template


class _Columns:
    """The columns of a frame, of which only those are read that are needed.

    Parameters
    ----------
    alias : str, optional
        What the only column is called as well.

    Attributes
    ----------
    whole : bool
        Give each row as a whole too, under "row".
    """

    def __init__(self, frame: pd.DataFrame, *, alias: str | None) -> None:
        self._frame = frame
        self._alias = alias
        self.labels: list[Hashable] = list(frame.columns)
        self.names = frozenset(label for label in self.labels if isinstance(label, str))
        if alias is not None:
            self.names |= {alias}
        self.needed: dict[Hashable, pd.Series] = {}
        self.whole = False

    def need(self, label: Hashable) -> None:
        """Read this column too; RequestError if there is none, or several."""
        if label == self._alias:
            column: Any = self._frame.iloc[:, 0]
        elif label in self.labels:
            column = self._frame[label]
        else:
            names = [str(known) for known in self.labels]
            close = difflib.get_close_matches(str(label), names, n=1)
            raise TemplateError(
                f"there is no column {label!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        if isinstance(column, pd.DataFrame):
            raise TemplateError(f"there are {column.shape[1]} columns {label!r}: rename all but one")
        self.needed[label] = column

    def __iter__(self) -> Iterator[Cells]:
        labels = list(self.needed)
        columns = self.needed.values()
        nulls = zip(*(column.isna().to_numpy(dtype=bool) for column in columns), strict=True)
        for values, null in zip(zip(*columns, strict=True), nulls, strict=True):
            cells = {
                label: _cell(label, value, gone)
                for label, value, gone in zip(labels, values, null, strict=True)
            }
            if self.whole:
                cells[ROW] = dict(cells)
            yield cells


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


def _frame(data: pd.DataFrame | pd.Series) -> tuple[pd.DataFrame, str | None]:
    """The data as a frame; for a Series also what a template calls it."""
    if isinstance(data, pd.DataFrame):
        return data, None
    if not isinstance(data, pd.Series):
        raise RequestError(f"a DataFrame or a Series is needed, got {type(data).__name__}")
    if objection := text_objection(data):
        raise RequestError(objection)
    name = template_name(data.name)
    return data.to_frame(name if data.name is None else data.name), name


def template_name(name: Hashable) -> str:
    """What a template calls a Series of this name."""
    return name if _is_spelled(name) else "text"


def _is_spelled(name: object) -> TypeGuard[str]:
    """Whether a template can call a column by this name: not "my column", nor "not", nor "none"."""
    if not isinstance(name, str) or not name.isidentifier():
        return False
    try:
        return name in Template(f"{{{{ {name} }}}}").names
    except TemplateError:
        return False


def _rendered(template: Template, cells: Cells) -> str:
    try:
        return template.render(cells)  # type: ignore[arg-type]
    except TemplateError as error:
        if isinstance(error.__cause__, _Missing):
            raise Skipped(str(error.__cause__)) from None
        raise


def _conversation(cell: Any) -> list[Message]:
    """A cell's chat messages."""
    if isinstance(cell, jinja2.Undefined):
        raise Skipped(cell._undefined_message)
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if not isinstance(cell, Sequence) or isinstance(cell, str | bytes):
        raise RequestError(f"messages are a list of {{role, content}}, got {type(cell).__name__}")
    if not cell:
        raise Skipped("there are no messages")
    for number, message in enumerate(cell, 1):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {number} is no {{role, content}}, but {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(f"message {number} needs a text as its {key}, got {message.get(key)!r}")
    if not cell[-1]["content"].strip():
        raise Skipped("the last message is empty")
    return [dict(message) for message in cell]


def _is_none(value: Any) -> bool:
    """Whether it is a null: of a cell, or in its list."""
    missing = value is None or value is pd.NA or isinstance(value, jinja2.Undefined)
    return missing or (isinstance(value, float) and math.isnan(value))


def _cell(label: Hashable, value: Any, null: bool) -> Any:
    if null:
        return _Gap(hint=f"{label!r} is null", exc=_Missing)
    if isinstance(value, str) and not value.strip():
        return _Gap(hint=f"{label!r} is empty", exc=_Missing)
    return value
