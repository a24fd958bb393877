"""The engine monitor: what runs, what waits, what the memory and the prefix cache hold, and what to stop.

Owns the widget: its synced traits, what its buttons do, and its end. The pace is feed.py's, the numbers are
readings.py's, and the drawing is js/src/monitor's. Never waits for the engine, and never keeps it alive.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from .feed import Feed
from .history import History
from .protocol import Abort, EngineCommand, RequestProgress, RequestRow, ViewChange, parse_message
from .readings import NOTHING_YET, Monitored, Reading, one_line, read, without_engine
from .static_view import as_html, as_text

__all__ = ["MonitorWidget"]

_STATIC = Path(__file__).parent.parent / "static"
_log = logging.getLogger(__name__)


class MonitorWidget(anywidget.AnyWidget):
    """A live view of one engine.

    Parameters
    ----------
    engine
        What to watch (`Monitored`). It is held weakly: keep the engine yourself, and the monitor shows
        "Stopped" once it is gone.

    Notes
    -----
    Numbers arrive from a thread at most five times a second, only those that changed, and only while a view
    can be seen. They move, and the buttons act, while a cell is busy. `close()` ends the thread.
    """

    # as text: anywidget watches a path, and the watcher would keep every monitor ever made
    _esm = (_STATIC / "monitor.js").read_text(encoding="utf-8")
    _css = (_STATIC / "monitor.css").read_text(encoding="utf-8")

    engine = traitlets.Dict().tag(sync=True)
    load = traitlets.Dict().tag(sync=True)
    history = traitlets.Dict().tag(sync=True)
    memory = traitlets.Dict().tag(sync=True)
    prefix = traitlets.Dict().tag(sync=True)
    rows: traitlets.List[RequestRow] = traitlets.List().tag(sync=True)
    progress: traitlets.List[RequestProgress] = traitlets.List().tag(sync=True)
    hidden_requests = traitlets.Int().tag(sync=True)

    def __init__(self, engine: Monitored) -> None:
        self._watched = weakref.ref(engine)
        self._past = History()
        self._reading: Reading = NOTHING_YET
        self._notice: str | None = None
        self._feed = _feed_of(self)
        self._ending = weakref.finalize(self, self._feed.close)
        self._look()
        super().__init__(**self._reading, history=self._past.band())
        _answer_on_a_subshell(self.comm)
        self.on_msg(self._receive)

    def close(self) -> None:
        """Remove every view, and end the thread."""
        self._ending()
        super().close()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        self._look()
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": as_text(self._reading), "text/html": as_html(self._reading)}, metadata

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Take a message of the browser, on whichever thread the kernel hands it over."""
        match parse_message(content):
            case ViewChange() as change:
                self._feed.view(change)
            case (Abort() | EngineCommand()) as asked:
                self._feed.ask(asked)
            case None:
                _log.debug("the monitor does not know the message %r", content)

    def _act(self, asked: Abort | EngineCommand) -> None:
        engine = self._watched()
        if engine is None:
            return
        try:
            match asked:
                case Abort(request_id=request_id):
                    engine.abort(request_id)
                case EngineCommand(command="abort_all"):
                    engine.abort_all()
                case EngineCommand(command="clear_cache"):
                    engine.clear_prefix_cache_soon()
                case EngineCommand(command="stop"):
                    engine.stop_soon()
        except Exception as error:  # a button must not end the thread that serves the others
            _log.warning("the monitor's %s failed", asked, exc_info=True)
            self._notice = one_line(error)
        else:
            self._notice = None

    def _look(self) -> None:
        """Read the engine, whatever has become of it."""
        engine = self._watched()
        if engine is None:
            self._reading = without_engine(self._reading, "stopped")
            return
        try:
            self._reading = read(engine, self._notice)
        except Exception as error:  # what can't be read is shown as that, not as the last good numbers
            _log.debug("the monitor can't read its engine", exc_info=True)
            self._reading = without_engine(
                self._reading, "error", f"Can't read the engine: {one_line(error)}"
            )
        if self._reading["engine"]["state"] in {"running", "idle"}:
            self._past.add(self._reading["load"]["decode"], self._reading["load"]["prefill"])

    def _publish(self) -> None:
        """Send what changed, in one message; nothing when nothing did."""
        self._look()
        with self.hold_sync():
            for name, value in self._reading.items():
                self.set_trait(name, value)
            self.set_trait("history", self._past.band())


def _feed_of(widget: MonitorWidget) -> Feed[Abort | EngineCommand]:
    """Return the feed of `widget`, whose thread ends when the widget is gone."""
    ref = weakref.ref(widget)

    def publish() -> bool:
        alive = ref()
        if alive is None:
            return False
        try:
            alive._publish()
        except Exception:  # the connection may close at any moment; the next round may find another
            _log.debug("the monitor could not publish", exc_info=True)
        return True

    def act(asked: Abort | EngineCommand) -> bool:
        alive = ref()
        if alive is None:
            return False
        alive._act(asked)
        return True

    return Feed(publish, act)


def _answer_on_a_subshell(comm: Any) -> None:
    """Let clicks in while a cell is busy.

    ipykernel 7 answers a comm's message on the shell that last published on it. Ours publishes from a thread,
    which counts as the main shell, so a click would queue behind the busy cell. The method is private, and
    absent before ipykernel 7: without it, clicks wait for the cell, as they do for every widget there.
    """
    if getattr(comm, "_reply_subshell_for", None) is not None:
        comm._reply_subshell_for = lambda _data, default: default
