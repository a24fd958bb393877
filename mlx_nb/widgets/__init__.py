"""Live views in the notebook.

Owns what is drawn in an output cell and what its buttons ask for. Nothing here knows how an engine works, and nothing
here imports IPython. Names load with their first use, so that the extension loads without anywidget.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import BatchWidget
    from .chat import ChatPanel
    from .monitor import MonitorWidget
    from .readings import Monitored
    from .tokens import TokensView

__all__ = ["BatchWidget", "ChatPanel", "MonitorWidget", "Monitored", "TokensView"]

_HOMES = {
    "BatchWidget": "batch",
    "ChatPanel": "chat",
    "MonitorWidget": "monitor",
    "Monitored": "readings",
    "TokensView": "tokens",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
