"""``df.mlx`` and ``df["text"].mlx``: importing this module registers them with pandas."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd

from .generate import call_of
from .options import Column
from .preview import Preview, preview_frame
from .rows import text_objection
from .scoring import ascore_frame, score_frame
from .tools import aclassify_frame, aextract_frame, classify_frame, extract_frame

__all__ = ["DaskAccessor", "FrameAccessor", "SeriesAccessor", "register_dask"]

NAME = "mlx"


class _Answers:
    """What frames and columns have in common, Dask's included."""

    _data: Any

    def generate(self, template: str | None = None, **options: Any) -> pd.DataFrame:
        """Answer a prompt for every row, columns as ``{{ name }}``; options as in `mlx_nb.generate_frame`.

        A Series' template has the text under the Series' name, or as ``{{ text }}`` if it has none. Without a
        template the texts are the prompts.
        """
        return call_of(self._data, template, **options).run()

    async def agenerate(self, template: str | None = None, **options: Any) -> pd.DataFrame:
        """`generate`, awaited."""
        return await call_of(self._data, template, **options).arun()

    def classify(self, labels: Sequence[str], template: str | None = None, **options: Any) -> pd.DataFrame:
        """Choose one of the labels for every row: the column "label", a category of all of them.

        Options as in `mlx_nb.generate_frame`. For a Series there is a template.
        """
        return classify_frame(self._data, labels, template, **options)

    async def aclassify(
        self, labels: Sequence[str], template: str | None = None, **options: Any
    ) -> pd.DataFrame:
        """`classify`, awaited."""
        return await aclassify_frame(self._data, labels, template, **options)

    def extract(self, schema: Any, template: str | None = None, **options: Any) -> pd.DataFrame:
        """Read the fields of a schema (a Pydantic model, or JSON schema) out of every row, as typed columns.

        Options as in `mlx_nb.generate_frame`. For a Series there is a template.
        """
        return extract_frame(self._data, schema, template, **options)

    async def aextract(self, schema: Any, template: str | None = None, **options: Any) -> pd.DataFrame:
        """`extract`, awaited."""
        return await aextract_frame(self._data, schema, template, **options)


class _Accessor(_Answers):
    """What a DataFrame and a column of texts have in common."""

    _data: pd.DataFrame | pd.Series

    def score(
        self, template: str | None, continuations: Sequence[str] | Column, **options: Any
    ) -> pd.DataFrame:
        """How likely the model finds given answers to every row's prompt: natural log-likelihoods.

        Several continuations give a column each, and "best"; ``mlx_nb.col("answer")`` is one of the row's own, and
        gives "logprob" and "tokens". ``per="token"`` divides by the number of tokens.
        """
        return score_frame(self._data, template, continuations, **options)

    async def ascore(
        self, template: str | None, continuations: Sequence[str] | Column, **options: Any
    ) -> pd.DataFrame:
        """`score`, awaited."""
        return await ascore_frame(self._data, template, continuations, **options)

    def preview(self, template: str | None = None, rows: int = 5, **options: Any) -> Preview:
        """Show the first prompts with their token counts, and estimate the whole; nothing is generated.

        Options as in `mlx_nb.generate_frame`.
        """
        return preview_frame(self._data, template, rows, **options)


class FrameAccessor(_Accessor):
    """Prompts over the columns of a DataFrame."""

    def __init__(self, data: pd.DataFrame) -> None:
        self._data = data


class SeriesAccessor(_Accessor):
    """Prompts over a column of texts; AttributeError for any other column."""

    def __init__(self, data: pd.Series) -> None:
        if objection := text_objection(data):
            raise AttributeError(objection)
        self._data = data


class DaskAccessor(_Answers):
    """Prompts over a frame of Dask, or a column of it, on the workers of ``client=`` or of the client in use."""

    def __init__(self, data: Any) -> None:
        if data.ndim == 1 and (objection := text_objection(data._meta)):
            raise AttributeError(objection)
        self._data = data


def register_dask() -> None:
    """Give Dask's frames and columns ``.mlx`` as well; importing this module does if Dask's are there."""
    from dask.dataframe import DataFrame, Series
    from dask.dataframe.extensions import register_dataframe_accessor, register_series_accessor

    _register(DataFrame, register_dataframe_accessor, DaskAccessor)
    _register(Series, register_series_accessor, DaskAccessor)


def _register(owner: type, register: Any, accessor: type) -> None:
    known = getattr(owner, NAME, None)
    if getattr(known, "__module__", None) == __name__:
        delattr(owner, NAME)  # ours, of an earlier import (a reload): pandas would warn of it
    register(NAME)(accessor)


_register(pd.DataFrame, pd.api.extensions.register_dataframe_accessor, FrameAccessor)
_register(pd.Series, pd.api.extensions.register_series_accessor, SeriesAccessor)
if "dask.dataframe" in sys.modules:
    register_dask()
