"""How a widget reaches the cell that shows it: twice, live and as a snapshot.

A front end draws the richest form it knows of an output, and of a widget whose kernel is gone it draws an error. So
each widget is two outputs: a snapshot in HTML, which any page and any export can show, and the live view. Where the
live view is drawn its style sheet hides the snapshot above it; where it is not, the snapshot hides the error.
The notebook says how an output is published, since nothing here knows IPython; where its extension isn't loaded, the
kernel that carries the widget's messages does.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["Publish", "Shown", "publish_with", "publisher", "show"]


class Publish(Protocol):
    """Puts a MIME bundle into the cell that runs, or replaces the one of that `display_id` wherever it is."""

    def __call__(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], *, display_id: str | None, update: bool
    ) -> None:
        """Publish."""


_way: list[Publish] = []  # at most one

# A widget's place with nothing of ours in it: still loading, or its model is gone.
_HIDE_DEAD = (
    "<style>.jp-OutputArea-child:has(.mlx-nb-snapshot)+.jp-OutputArea-child:has(.jupyter-widgets)"
    ":not(:has(.mlx)){display:none}</style>"
)


def publish_with(publish: Publish | None) -> None:
    """Set how outputs are published; None where only one output at a time can be had."""
    _way[:] = [] if publish is None else [publish]


def publisher(comm: Any = None) -> Publish | None:
    """Return how outputs are published, if there is a way: the notebook's, else that of the kernel of `comm`."""
    if _way:
        return _way[0]
    put = getattr(
        getattr(getattr(getattr(comm, "kernel", None), "shell", None), "display_pub", None), "publish", None
    )
    if put is None:
        return None

    def publish(
        data: Mapping[str, Any], metadata: Mapping[str, Any], *, display_id: str | None, update: bool
    ) -> None:
        put(
            dict(data),
            dict(metadata),
            transient={} if display_id is None else {"display_id": display_id},
            update=update,
        )

    return publish


class Shown:
    """A snapshot in a cell, which can be replaced."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex

    def put(self, publish: Publish, text: str, html: str, *, update: bool = True) -> None:
        """Publish the snapshot."""
        data = {"text/plain": text, "text/html": f'<div class="mlx-nb-snapshot">{_HIDE_DEAD}{html}</div>'}
        publish(data, {}, display_id=self._id, update=update)


def show(publish: Publish, text: str, html: str, view: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Shown:
    """Show a snapshot with the live view after it."""
    shown = Shown()
    shown.put(publish, text, html, update=False)
    data, metadata = view
    publish({**data, "text/plain": ""}, metadata, display_id=None, update=False)
    return shown
