"""The engine monitor: what runs, what waits, what the memory and the prefix cache hold, and what to stop.

Owns the widget: its synced traits and what its buttons do. Its life is live.py's, the numbers are readings.py's,
and the drawing is js/src/monitor's. Never waits for the engine, and never keeps it alive.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import traitlets

from .history import History
from .live import LiveWidget, asset
from .protocol import Abort, Asked, Command, EngineCommand, MonitorState, RequestProgress, RequestRow
from .readings import NOTHING_YET, Monitored, Reading, one_line, read, without_engine
from .static_view import as_html, as_text

__all__ = ["MonitorWidget"]

_LIVE: frozenset[MonitorState] = frozenset({"running", "idle", "paused", "unloaded"})
_log = logging.getLogger(__name__)


class MonitorWidget(LiveWidget):
    """A live view of one engine.

    Parameters
    ----------
    engine
        What to watch (`Monitored`). It is held weakly: keep the engine yourself, and the monitor shows
        "Stopped" once it is gone.
    name : str, optional
        What ``%mlx_engine`` calls it, if it does: the command shown to start it again names it.
    """

    _kind = "monitor"
    _esm = asset("monitor.js")
    _css = asset("monitor.css")

    engine = traitlets.Dict().tag(sync=True)
    load = traitlets.Dict().tag(sync=True)
    history = traitlets.Dict().tag(sync=True)
    memory = traitlets.Dict().tag(sync=True)
    prefix = traitlets.Dict().tag(sync=True)
    rows: traitlets.List[RequestRow] = traitlets.List().tag(sync=True)
    progress: traitlets.List[RequestProgress] = traitlets.List().tag(sync=True)
    hidden_requests = traitlets.Int().tag(sync=True)

    def __init__(self, engine: Monitored, *, name: str | None = None) -> None:
        self._watched = weakref.ref(engine)
        self._name = name
        self._past = History()
        self._reading: Reading = NOTHING_YET
        self._notice: str | None = None
        super().__init__()

    def _act(self, asked: Asked) -> None:
        engine = self._watched()
        if engine is None:
            return
        try:
            match asked:
                case Abort(request_id=request_id):
                    engine.abort(request_id)
                case EngineCommand(command=command):
                    _do(engine, command)
        except Exception as error:
            _log.warning("the monitor's %s failed", asked, exc_info=True)
            self._notice = one_line(error)
        else:
            self._notice = None
        self._publish()

    def _read(self) -> Mapping[str, Any]:
        """Read the engine, whatever has become of it."""
        self._reading = self._look()
        if self._reading["engine"]["state"] in _LIVE:
            self._past.add(self._reading["load"]["decode"], self._reading["load"]["prefill"])
        return {**self._reading, "history": self._past.band()}

    def _look(self) -> Reading:
        engine = self._watched()
        if engine is None:
            return without_engine(self._reading, "stopped")
        try:
            return read(engine, self._name, self._notice)
        except Exception as error:  # what can't be read is shown as that, not as the last good numbers
            _log.debug("the monitor can't read its engine", exc_info=True)
            return without_engine(self._reading, "error", f"Can't read the engine: {one_line(error)}")

    def _as_text(self) -> str:
        return as_text(self._reading)

    def _as_html(self) -> str:
        return as_html(self._reading)


def _do(engine: Monitored, command: Command) -> None:
    match command:
        case "pause":
            engine.pause()
        case "resume":
            engine.resume()
        case "abort_all":
            engine.abort_all()
        case "clear_cache":
            engine.clear_prefix_cache_soon()
        case "stop":
            engine.stop_soon()
        case "restart":
            engine.restart_soon()
