"""What every widget shares: the pace of one thread, views that come and go, buttons, and a snapshot.

Owns a widget's life between its first display and `close`. What it shows and what its buttons do is a subclass's.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import anywidget

from . import outputs
from .feed import Feed
from .protocol import Asked, ViewChange, parse_message

__all__ = ["LiveWidget", "asset"]

SNAPSHOT_S = 30.0
"""Seconds between two replacements of a snapshot while its widget lives: each one makes the notebook unsaved."""

_STATIC = Path(__file__).parent.parent / "static"
_log = logging.getLogger(__name__)


def asset(name: str) -> str:
    """Return a file of the bundle as text: anywidget watches a path, and the watcher would keep every widget."""
    return (_STATIC / name).read_text(encoding="utf-8")


class LiveWidget(anywidget.AnyWidget):
    """A widget that is read from a thread while somebody looks.

    A subclass sets `_esm` and `_css` from `asset`, declares its synced traits, and defines `_read`, `_act`,
    `_as_text` and `_as_html`. All of them are called on the widget's thread, and on the one that makes it.

    Notes
    -----
    Values arrive at most five times a second, only those that changed, and only while a view can be seen; they
    move, and buttons act, while a cell is busy. `close` removes every view and ends the thread.
    """

    _kind: ClassVar[str]
    """What people call it, in messages."""

    def __init__(self) -> None:
        self._feed = _feed_of(self)
        self._ending = weakref.finalize(self, self._feed.close)
        self._shown: list[outputs.Shown] = []
        self._kept = ""
        self._keep_at = 0.0
        super().__init__(**self._read())
        _answer_on_a_subshell(self.comm)
        self.on_msg(self._receive)

    def _read(self) -> Mapping[str, Any]:
        """Return the synced traits as they are now. What can't be read is shown, not raised."""
        raise NotImplementedError

    def _act(self, asked: Asked) -> None:
        """Carry out what a view asks for."""
        raise NotImplementedError

    def _as_text(self) -> str:
        """Return what was last read as one line."""
        raise NotImplementedError

    def _as_html(self) -> str:
        """Return what was last read as HTML that needs nothing else; everything in it is escaped."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove every view, and end the thread. What stays in the notebook is a snapshot of this moment."""
        if self._ending.alive:
            self._ending()
            self._read()
            self._keep(now=True)
        super().close()

    def show(self, **kwargs: Any) -> bool:
        """Show it in the cell that runs; False where outputs can't be published."""
        self._read()
        publish, view = outputs.publisher(self.comm), super()._repr_mimebundle_(**kwargs)
        if publish is None or view is None:
            return False
        self._shown.append(outputs.show(publish, self._as_text(), self._as_html(), view))
        return True

    def _ipython_display_(self, **kwargs: Any) -> None:
        if not self.show(**kwargs):
            raise NotImplementedError  # IPython then takes the bundle below

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        self._read()
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": self._as_text(), "text/html": self._as_html()}, metadata

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Take a message of the browser, on whichever thread the kernel hands it over."""
        match parse_message(content):
            case ViewChange() as change:
                self._feed.view(change)
            case None:
                _log.debug("the %s does not know the message %r", self._kind, content)
            case asked:
                self._feed.ask(asked)

    def _publish(self) -> None:
        """Send what changed, in one message; nothing when nothing did."""
        values = self._read()
        with self.hold_sync():
            for name, value in values.items():
                self.set_trait(name, value)
        self._keep()

    def _keep(self, *, now: bool = False) -> None:
        """Bring the snapshots in the notebook up to date, at once or when it is time for it."""
        publish = outputs.publisher(self.comm)
        if publish is None or not self._shown or not (now or time.monotonic() >= self._keep_at):
            return
        self._keep_at = time.monotonic() + SNAPSHOT_S
        html = self._as_html()
        if html == self._kept:
            return
        self._kept = html
        for shown in self._shown:
            shown.put(publish, self._as_text(), html)


def _feed_of(widget: LiveWidget) -> Feed[Asked]:
    """Return the feed of `widget`, whose thread ends when the widget is gone."""
    ref = weakref.ref(widget)

    def publish() -> bool:
        alive = ref()
        if alive is None:
            return False
        try:
            alive._publish()
        except Exception:  # the connection may close at any moment; the next round may find another
            _log.debug("the %s could not publish", alive._kind, exc_info=True)
        return True

    def act(asked: Asked) -> bool:
        alive = ref()
        if alive is None:
            return False
        try:
            alive._act(asked)
        except Exception:  # a button must not end the thread that serves the others
            _log.warning("the %s could not carry out %r", alive._kind, asked, exc_info=True)
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
