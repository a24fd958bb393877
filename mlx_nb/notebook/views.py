"""Where a streamed answer is drawn: a display of its own in a notebook, plain text in a terminal."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.display import display

from ..outputs import RequestOutput
from .kernel import in_kernel

__all__ = ["StatusLine", "View", "finish_line", "markdown", "place", "view_for"]

REDRAW_S = 0.1
"""Each update of a display sends the whole text again: ten times a second is smooth, and not a flood."""

WAITING = "…"
_SMALL = "font-size: 85%; opacity: 0.7"
Later = Callable[[float, Callable[[], None]], Any]


class View(Protocol):
    """What an answer is streamed into."""

    def open(self) -> None:
        """Claim a place in the cell."""

    def show(self, text: str, later: Later | None = None) -> None:
        """The answer so far; `later(seconds, function)` lets a draw that comes too soon be made up for."""

    def close(self, text: str, note: str) -> None:
        """The whole answer, and a line about it."""


def view_for(shell: Any) -> View:
    """The view that suits where the shell runs."""
    return CellView(shell) if in_kernel(shell) else TerminalView()


class CellView:
    """Markdown in one display, which is updated wherever it is by then. Under ``%%capture`` it is drawn once."""

    def __init__(self, shell: Any) -> None:
        self._captured = isinstance(shell.display_pub, CapturingDisplayPublisher)
        self._handle: Any = None
        self._text = ""
        self._drawn_at = 0.0
        self._pending: Any = None

    def open(self) -> None:
        """Show that the answer will come here."""
        if not self._captured:
            self._handle = place(markdown(WAITING), keep=True)

    def show(self, text: str, later: Later | None = None) -> None:
        """Draw, if the last time is long enough ago."""
        self._text = text
        wait = self._drawn_at + REDRAW_S - time.monotonic()
        if wait <= 0:
            self._draw()
        elif later is not None and self._pending is None:
            self._pending = later(wait, self._draw)

    def _draw(self) -> None:
        self._forget_pending()
        if self._handle is not None and self._text:
            self._drawn_at = time.monotonic()
            self._handle.update(markdown(self._text), raw=True)

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def close(self, text: str, note: str) -> None:
        """Draw the end, and a small grey line under it."""
        self._forget_pending()
        if self._handle is None:
            place(markdown(text))
        else:
            self._handle.update(markdown(text), raw=True)
        small = f'<div style="{_SMALL}">{html.escape(note)}</div>'
        place({"text/plain": note, "text/html": small})


class TerminalView:
    """Deltas to stdout."""

    def __init__(self) -> None:
        self._shown = 0

    def open(self) -> None:
        """Nothing to claim."""

    def show(self, text: str, later: Later | None = None) -> None:  # noqa: ARG002 - nothing is ever put off
        """Write what is new."""
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = len(text)

    def close(self, text: str, note: str) -> None:
        """Write the rest, and the line."""
        self.show(text)
        sys.stdout.write(f"\n({note})\n")


class StatusLine:
    """A line of plain text that is replaced as things go on."""

    def __init__(self, shell: Any) -> None:
        self._replaces = in_kernel(shell) and not isinstance(shell.display_pub, CapturingDisplayPublisher)
        self._handle: Any = None
        self._text = ""

    def show(self, text: str) -> None:
        """Replace the line; where that can't be done, add one."""
        if text == self._text:
            return
        self._text = text
        if not self._replaces:
            sys.stdout.write(text + "\n")
        elif self._handle is None:
            self._handle = place({"text/plain": text}, keep=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def finish_line(output: RequestOutput) -> str:
    """How it went: tokens, speed, time to the first token, what the cache held, why it ended."""
    made, timings = output.completion_tokens, output.timings
    first, total = timings.get("ttft_s"), timings.get("total_s", 0.0)
    parts = ["1 token" if made == 1 else f"{made:,} tokens"]
    if first is not None and made > 1 and total > first:
        parts.append(f"{(made - 1) / (total - first):,.1f} tokens/s")
    if first is not None:
        parts.append(f"first token after {first:.2f} s")
    if output.cached_tokens:
        parts.append(f"{output.cached_tokens:,} of {output.prompt_tokens:,} prompt tokens cached")
    parts.append(_ENDINGS.get(output.finish_reason or "", output.finish_reason or "unfinished"))
    return " · ".join(parts)


_ENDINGS = {"length": "length (max tokens)", "abort": "interrupted"}


def place(what: Any, *, keep: bool = False) -> Any:
    """Display an object, or a bundle of MIME types, in the cell; with `keep` the handle to update it by."""
    raw = isinstance(what, dict)
    return display(what, raw=raw, display_id=keep or None)  # type: ignore[no-untyped-call, unused-ignore]


def markdown(text: str) -> dict[str, str]:
    """A bundle for a text of the model: markdown, never HTML of our making."""
    return {"text/plain": text, "text/markdown": text}
