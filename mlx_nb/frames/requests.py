"""The live requests of an engine as a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

__all__ = ["requests_frame"]

_COLUMNS = {
    "status": "string",
    "phase": "string",
    "prompt_tokens": "int64",
    "prefilled_tokens": "int64",
    "completion_tokens": "int64",
    "max_tokens": "int64",
    "progress": "float64",
    "elapsed_s": "float64",
    "ttft_s": "float64",
    "tokens_per_second": "float64",
    "cache_hit_type": "string",
    "cached_tokens": "int64",
}


def requests_frame(requests: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a request, indexed by its id, from ``get_stats()["requests"]``; the columns don't depend on the rows.

    Other things that are known of a request (such as the beginning of its prompt) follow as they are.
    """
    ids = pd.Index([row["request_id"] for row in requests], name="request_id", dtype="string")
    more = {name: None for row in requests for name in row if name not in {"request_id", *_COLUMNS}}
    known = {
        name: pd.Series([row[name] for row in requests], index=ids, dtype=kind)
        for name, kind in _COLUMNS.items()
    }
    return pd.DataFrame(known | {name: [row.get(name) for row in requests] for name in more}, index=ids)
