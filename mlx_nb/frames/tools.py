"""What people do with a column most often: sort it, and read fields out of it.

Each is a call of `generate_frame` with options of its own; prompts, rows and results are made there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..errors import RequestError
from ..sampling import SamplingParams
from ..validation import several
from .generate import Call, call_of, is_dask
from .native import native_of
from .rows import template_name

if TYPE_CHECKING:
    from .dask_call import ClusterCall

__all__ = ["aclassify_frame", "aextract_frame", "classify_frame", "extract_frame"]


# -- one of several labels ---------------------------------------------------------------------------------------


def classify_frame(
    data: pd.DataFrame | pd.Series, labels: Sequence[str], template: str | None = None, **options: Any
) -> pd.DataFrame:
    """Choose one of `labels` for every row: the column "label", a category of all of them.

    Parameters
    ----------
    data, template, **options
        As of `mlx_nb.generate_frame`, without structured output. For a Series there is a template.
    labels : sequence of str
        The model can answer nothing else.
    """
    return _classifying(data, labels, template, options).run()


async def aclassify_frame(
    data: pd.DataFrame | pd.Series, labels: Sequence[str], template: str | None = None, **options: Any
) -> pd.DataFrame:
    """`classify_frame`, awaited."""
    return await _classifying(data, labels, template, options).arun()


def _classifying(
    data: Any, labels: Sequence[str], template: str | None, options: Mapping[str, Any]
) -> Call | ClusterCall:
    labels = several("labels", labels)
    if len(set(map(str, labels))) < max(len(labels), 2):
        raise RequestError("labels are two texts or more, all different")
    if template is None and "messages" not in options:
        listed = ", ".join(map(str, labels))
        template = _about(data, f"Which of these describes the text best: {listed}?")
    params = SamplingParams(choices=labels)  # refuses what is no text
    return call_of(
        data,
        template,
        choices=params.choices,
        answer="label",
        dtype=pd.CategoricalDtype(list(params.choices or ())),
        **options,
    )


# -- fields ------------------------------------------------------------------------------------------------------


def extract_frame(
    data: pd.DataFrame | pd.Series, schema: Any, template: str | None = None, **options: Any
) -> pd.DataFrame:
    """Read the fields of `schema` out of every row, as typed columns.

    Parameters
    ----------
    data, template, **options
        As of `mlx_nb.generate_frame`. For a Series there is a template.
    schema
        A Pydantic model, or a JSON schema as dict or text.
    """
    return _extracting(data, schema, template, options).run()


async def aextract_frame(
    data: pd.DataFrame | pd.Series, schema: Any, template: str | None = None, **options: Any
) -> pd.DataFrame:
    """`extract_frame`, awaited."""
    return await _extracting(data, schema, template, options).arun()


def _extracting(
    data: Any, schema: Any, template: str | None, options: Mapping[str, Any]
) -> Call | ClusterCall:
    if schema is None:
        raise RequestError("extract needs a schema: a Pydantic model, or a JSON schema as dict or text")
    if template is None and "messages" not in options:
        fields = (SamplingParams(schema=schema).json_schema or {}).get("properties") or {}
        named = f" ({', '.join(fields)})" if fields else ""
        template = _about(data, f"Write what the text says as JSON{named}.")
    return call_of(data, template, schema=schema, **options)


def _about(data: Any, task: str) -> str | None:
    """A template for a Series, the same beginning for all rows and the text last; there is none for a frame."""
    native = native_of(data)
    if isinstance(data, pd.Series) or (is_dask(data) and data.ndim == 1):
        names: Sequence[Any] = [data.name]
    else:
        names = native.series if native is not None else ()
    for name in names:
        return f"{{% raw %}}{task}{{% endraw %}}\n\nText: {{{{ {template_name(name)} }}}}"
    return None
