"""``df.mlx`` and ``df["text"].mlx``: importing this module registers them with pandas."""

from __future__ import annotations

from typing import Any

import pandas as pd

from .generate import agenerate_frame, generate_frame
from .rows import text_objection

__all__ = ["FrameAccessor", "SeriesAccessor"]

NAME = "mlx"


class FrameAccessor:
    """Prompts over the columns of a DataFrame."""

    def __init__(self, data: pd.DataFrame) -> None:
        self._data = data

    def generate(self, template: str | None = None, **options: Any) -> pd.DataFrame:
        """Answer a prompt for every row, columns as ``{{ name }}``; options as in `mlx_nb.generate_frame`."""
        return generate_frame(self._data, template, **options)

    async def agenerate(self, template: str | None = None, **options: Any) -> pd.DataFrame:
        """`generate`, awaited."""
        return await agenerate_frame(self._data, template, **options)


class SeriesAccessor:
    """Prompts over a column of texts; AttributeError for any other column."""

    def __init__(self, data: pd.Series) -> None:
        if objection := text_objection(data):
            raise AttributeError(objection)
        self._data = data

    def generate(self, template: str | None = None, **options: Any) -> pd.DataFrame:
        """Answer a prompt for every text; options as in `mlx_nb.generate_frame`.

        The template has the text under the Series' name, or as ``{{ text }}`` if it has none. Without a template
        the texts are the prompts.
        """
        return generate_frame(self._data, template, **options)

    async def agenerate(self, template: str | None = None, **options: Any) -> pd.DataFrame:
        """`generate`, awaited."""
        return await agenerate_frame(self._data, template, **options)


def _register(owner: type, register: Any, accessor: type) -> None:
    known = getattr(owner, NAME, None)
    if getattr(known, "__module__", None) == __name__:
        delattr(owner, NAME)  # ours, of an earlier import (a reload): pandas would warn of it
    register(NAME)(accessor)


_register(pd.DataFrame, pd.api.extensions.register_dataframe_accessor, FrameAccessor)
_register(pd.Series, pd.api.extensions.register_series_accessor, SeriesAccessor)
