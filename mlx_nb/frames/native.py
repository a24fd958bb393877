"""DataFrames and Series of other libraries, Polars above all, by way of narwhals.

Rows are read from a pandas frame of plain Python values; what is new in the result goes back in the caller's kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..errors import RequestError
from .results import Form

__all__ = ["Native", "native_of"]

_LIBRARIES = ("polars", "pyarrow")


def native_of(data: Any) -> Native | None:
    """Data of a library that narwhals knows; None for pandas, and for what is no data."""
    if isinstance(data, pd.DataFrame | pd.Series):
        return None
    library = type(data).__module__.partition(".")[0]
    try:
        import narwhals.stable.v2 as nw
    except ImportError:
        if library in _LIBRARIES:
            raise RequestError(f"data of {library} needs narwhals: pip install 'mlx-nb[polars]'") from None
        return None
    read: Any = nw.from_native(data, eager_only=True, allow_series=True, pass_through=True)
    if isinstance(read, nw.DataFrame):
        return Native(read)
    if isinstance(read, nw.Series):
        return Native(read.alias(read.name or "text").to_frame(), series=[read.name or None])
    if library in _LIBRARIES and hasattr(data, "collect"):
        raise RequestError(f"a {type(data).__name__} has no rows yet: collect() it first")
    return None


class Native:
    """A frame of another library.

    Parameters
    ----------
    frame : narwhals.DataFrame
    series : sequence
        The name of a Series, whose only column this is; nothing for a frame.
    """

    def __init__(self, frame: Any, series: Sequence[str | None] = ()) -> None:
        self._frame, self.series = frame, series

    @property
    def pandas(self) -> pd.DataFrame | pd.Series:
        """The same in pandas, as plain Python values."""
        columns = {name: _plain(self._frame[name].to_list()) for name in self._frame.columns}
        for name in self.series:
            return next(iter(columns.values())).rename(name)
        return pd.DataFrame(columns, index=pd.RangeIndex(len(self._frame)))

    def result(self, frame: pd.DataFrame, form: Form) -> Any:
        """A result in the caller's kind: its own columns untouched, and what `form` adds."""
        added = form.added
        names = list(map(str, frame.columns)) if added is None else added
        new = [self._column(name, frame[name]) for name in names]
        if added is None:
            return new[0].to_frame().with_columns(*new[1:]).to_native()
        places = np.arange(len(self._frame)).repeat(len(frame) // max(1, len(self._frame)))
        return self._frame[places.tolist(), :].with_columns(*new).to_native()

    def _column(self, name: str, column: pd.Series) -> Any:
        import narwhals.stable.v2 as nw

        values = [None if gone else value for value, gone in zip(column, column.isna(), strict=True)]
        backend = self._frame.implementation
        dtype = _dtype(column.dtype)
        if dtype is not None:
            return nw.new_series(name, values, dtype, backend=backend)
        try:
            return nw.new_series(name, values, backend=backend)
        except Exception:  # values of several types: each library has an error of its own
            return nw.new_series(name, values, nw.Object(), backend=backend)


def _plain(values: Sequence[Any]) -> pd.Series:
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return pd.Series(array, dtype=object)


def _dtype(dtype: Any) -> Any:
    """What a column of ours is elsewhere; None for objects."""
    import narwhals.stable.v2 as nw

    if isinstance(dtype, pd.CategoricalDtype):
        categories = dtype.categories.tolist()
        if all(isinstance(category, str) for category in categories):
            return nw.Enum(categories)
        return nw.Int64() if all(isinstance(category, int) for category in categories) else None
    known = {"string": nw.String(), "Int64": nw.Int64(), "Float64": nw.Float64(), "boolean": nw.Boolean()}
    return known.get(str(dtype))
