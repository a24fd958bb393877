"""How a job shows where it is: a view in its cell, or a bar where there are no widgets.

Owns the choice between them, and when they come and go. Both look at the job from a thread of their own, so a job
runs as fast as one that shows nothing. Where widgets can be shown is for the notebook to say (`widgets.outputs`).
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import shlex
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..engine.core import EngineCore
from ..errors import RequestError
from ..widgets import outputs
from .snapshot import Snapshot

if TYPE_CHECKING:
    from ..widgets.batch import About, BatchWidget

__all__ = ["Progress", "check_progress", "shown"]

Progress = bool | Literal["bar", "widget"]
"""What a person may ask for: True is a widget where there are any, else a bar."""

APPEARS_S = 0.3
"""A job that ends sooner leaves a line; a view that comes and is done would only flicker."""

BAR_S = 0.1
"""Seconds between two looks of a bar at its job."""

_log = logging.getLogger(__name__)


def check_progress(progress: Progress) -> None:
    """Refuse what can't be shown here."""
    if not (isinstance(progress, bool) or progress in ("bar", "widget")):
        raise RequestError(f"progress is True, False, 'bar' or 'widget', got {progress!r}")
    if progress == "widget" and outputs.publisher() is None:
        raise RequestError(
            "progress='widget' needs a notebook with the extension: run %load_ext mlx_nb there, or leave it out"
        )


class Shown(Protocol):
    """A job that can be shown; every member may be used from any thread and returns at once."""

    def snapshot(self) -> Snapshot:
        """How far it is."""

    def pause(self) -> None:
        """Start no more rows for now."""

    def resume(self) -> None:
        """Start rows again."""

    def stop(self) -> None:
        """End it early."""


@contextlib.contextmanager
def shown(
    job: Shown, progress: Progress, *, core: EngineCore | None, title: str, engine: str | None = None
) -> Iterator[None]:
    """Show a job until the end of the block; how it ended stays.

    Parameters
    ----------
    progress : bool or {"bar", "widget"}
        As `check_progress` takes it.
    core : EngineCore, optional
        What the job runs on, if that is in this process.
    title : str
        What the job does.
    engine : str, optional
        The engine's name, if it isn't the current one.
    """
    if progress is False:
        yield
        return
    publish = None if progress == "bar" else outputs.publisher()
    display = _Bar(job) if publish is None else _View(job, _about(core, title, engine), publish)
    try:
        yield
    finally:
        display.end()


def _about(core: EngineCore | None, title: str, engine: str | None) -> About:
    from ..widgets.batch import About
    from ..widgets.readings import one_line

    if core is None:
        return About(title, lambda: None, "")
    ref = weakref.ref(core)  # the view stays in its cell longer than the engine may live

    def failure() -> str | None:
        core = ref()
        if core is None or core.state not in {"failed", "stopped", "closed"}:
            return None
        return "It was stopped." if core.failure is None else one_line(core.failure)

    name = "" if engine is None else f" {shlex.quote(engine)}"
    return About(title, failure, f"%mlx_engine restart{name}")


class _Display:
    """Looks at a job from a thread, in the caller's context: or it would draw into whichever cell began last."""

    def __init__(self, job: Shown) -> None:
        self._job = job
        self._over = threading.Event()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._work,), name="mlx_nb progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Show how it ended."""
        self._over.set()
        self._thread.join()
        self._finish()

    def _work(self) -> None:
        """Show the job until it is over."""
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


class _View(_Display):
    """A widget that comes when the job has run for a moment; a job that is over by then leaves its summary."""

    def __init__(self, job: Shown, about: About, publish: outputs.Publish) -> None:
        self._about, self._publish = about, publish
        self._widget: BatchWidget | None = None
        super().__init__(job)

    def _work(self) -> None:
        if self._over.wait(APPEARS_S):
            return
        from ..widgets.batch import BatchWidget

        try:
            widget = BatchWidget(self._job, self._about)
            if widget.show():
                self._widget = widget
        except Exception:  # the page may be gone; the job has other things to do
            _log.warning("the progress of a job can't be shown", exc_info=True)

    def _finish(self) -> None:
        if self._widget is not None:
            self._widget.end()
            return
        from ..widgets.batch import as_html, as_text, read

        last = read(self._job, self._about)
        data = {"text/plain": as_text(last), "text/html": as_html(last)}
        self._publish(data, {}, display_id=None, update=False)


class _Bar(_Display):
    """tqdm's bar, in text: whoever has no widgets has none of tqdm's either."""

    def __init__(self, job: Shown) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=job.snapshot().total, unit="row")
        super().__init__(job)

    def _work(self) -> None:
        while not self._over.wait(BAR_S):
            self._look()

    def _finish(self) -> None:
        self._look()
        self._bar.close()

    def _look(self) -> None:
        now = self._job.snapshot()
        if now.failed:
            self._bar.set_postfix(failed=now.failed, refresh=False)
        self._bar.update(now.done - self._bar.n)
