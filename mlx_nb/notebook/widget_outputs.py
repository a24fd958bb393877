"""Lets widgets put their outputs into cells: the notebook's half of `widgets.outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython.display import publish_display_data

from ..widgets import outputs
from .kernel import in_kernel

__all__ = ["WidgetOutputs"]


class WidgetOutputs:
    """In a notebook, until `remove`."""

    def __init__(self, shell: Any) -> None:
        outputs.publish_with(_publish if in_kernel(shell) else None)

    @staticmethod
    def remove() -> None:
        """Take the way to publish away again."""
        outputs.publish_with(None)


def _publish(
    data: Mapping[str, Any], metadata: Mapping[str, Any], *, display_id: str | None, update: bool
) -> None:
    transient = {} if display_id is None else {"display_id": display_id}
    publish_display_data(dict(data), dict(metadata), transient=transient, update=update)  # type: ignore[no-untyped-call, unused-ignore]
