"""Sampling parameters that may differ from row to row.

Owns ``col("name")``, and how a cell's value becomes a parameter. A value that can't be one is its row's error.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jinja2

from ..errors import RequestError
from ..sampling import SamplingParams

__all__ = ["Column", "RowParams", "col"]

GREEDY = SamplingParams(temperature=0)

_WHOLE = frozenset({"max_tokens", "top_k", "repetition_window", "seed"})
_STRUCTURED = frozenset({"schema", "regex", "choices", "grammar"})


@dataclass(frozen=True, slots=True)
class Column:
    """Stands for a column's value, row by row. Made by `col`."""

    name: Hashable


def col(name: Hashable) -> Column:
    """A column's value in place of an option of `mlx_nb.generate_frame`: ``max_tokens=mlx_nb.col("length")``.

    Where the column is null the row has the call's default.
    """
    return Column(name)


class RowParams:
    """The parameters of each row and sample.

    Parameters
    ----------
    sampling : mapping
        Fields of `SamplingParams`, a `Column` in place of those that differ.

    Raises
    ------
    ValueError
        For what no row could have: an unknown field, a value out of range.

    Attributes
    ----------
    base : SamplingParams
        What is the same for all rows.
    columns : dict of str to Column
    """

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        self.columns = {name: value for name, value in sampling.items() if isinstance(value, Column)}
        known = {field.name for field in fields(SamplingParams)}
        fixed = {
            name: value for name, value in sampling.items() if name not in self.columns or name not in known
        }
        self.base = GREEDY.but(**fixed)
        if "logprobs" in sampling:
            raise RequestError("a DataFrame has no column for log-probabilities: see .mlx.score")
        if len(structured := _STRUCTURED & set(sampling)) > 1:
            raise RequestError(f"{' and '.join(sorted(structured))} exclude each other: give one")
        self._samples: list[SamplingParams] = []

    @property
    def differs_in_structure(self) -> bool:
        """Whether each row has a schema, regex, choices or grammar of its own."""
        return not _STRUCTURED.isdisjoint(self.columns)

    def of(self, cells: Mapping[Hashable, Any], sample: int = 0) -> SamplingParams:
        """Those of a row's sample, the second one's seed one higher; ValueError for a cell that can't be one."""
        if self.columns:
            given = {
                name: _value(name, cells[column.name])
                for name, column in self.columns.items()
                if not isinstance(cells[column.name], jinja2.Undefined)
            }
            return _sampled(self.base.but(**given), sample)
        while len(self._samples) <= sample:
            self._samples.append(_sampled(self.base, len(self._samples)))
        return self._samples[sample]


def _sampled(params: SamplingParams, sample: int) -> SamplingParams:
    if sample == 0 or params.seed is None:
        return params
    return params.but(seed=(params.seed + sample) % 2**64)


def _value(name: str, cell: Any) -> Any:
    """A cell as plain Python; whole numbers that pandas keeps as floats because the column has nulls."""
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if name in _WHOLE and isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell
