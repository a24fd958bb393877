"""Stop strings on text: nothing that may be part of one is let through before that is decided."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopFilter"]


class StopFilter:
    """Lets text through up to the stop string that is complete first.

    The result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take a piece; return the text it lets through, and whether a stop string is complete."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        # The match that ends first is the one a reader of single characters would see; of two that end
        # together, the longer.
        found = min(
            ((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            self._held = ""
            return text[: found[1]], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Text held back, now that nothing follows it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (shorter than `stop`)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
