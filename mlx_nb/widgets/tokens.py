"""The token view: an answer's tokens shaded by their probability, with what might have stood in their place.

Owns the widget: what is sent of an answer, and when. A long answer is never sent anew while it grows: new tokens
travel as messages, and the whole list as a trait, when a view asks for it and at the end. The numbers are
token_items.py's, the page of a saved notebook is token_page.py's, and the drawing is js/src/tokens'.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import traitlets

from ..outputs import TokenLogprob
from .live import LiveWidget, asset
from .protocol import AllTokens, AnswerBand, AnswerState, Asked, NewTokens, TokenItem, parse_message
from .token_items import Answered, Tokens
from .token_page import answer_html, answer_text, uncertain_table

__all__ = ["GrowingTokens", "TokensView"]

_STATES: Mapping[str | None, AnswerState] = {"abort": "stopped", "error": "error"}


class _TokenWidget(LiveWidget):
    """What both kinds of view have in common: what they show."""

    _kind = "token view"
    _esm = asset("tokens.js")
    _css = asset("tokens.css")

    answer = traitlets.Dict().tag(sync=True)
    figures = traitlets.Dict().tag(sync=True)
    tokens: traitlets.List[TokenItem] = traitlets.List().tag(sync=True)

    def __init__(self, title: str, k: int) -> None:
        self._band: AnswerBand = {"state": "running", "title": title, "note": "", "k": k}
        self._taken = Tokens()
        super().__init__()

    def _read(self) -> Mapping[str, Any]:
        return {"answer": dict(self._band), "figures": self._taken.figures, "tokens": self._taken.items}

    def _as_text(self) -> str:
        items = self._taken.items
        return "\n\n".join(filter(None, [answer_text(items), uncertain_table(items)]))

    def _as_html(self) -> str:
        return answer_html(self._band, self._taken.figures, self._taken.items)


class TokensView(_TokenWidget):
    """An answer, its tokens shaded by probability.

    A token's alternatives show when it is pointed at, or reached with the arrow keys. The probabilities are the
    model's own, before temperature and penalties.

    Parameters
    ----------
    answer
        Anything with `logprobs` and a `finish_reason`: what ``mlx_nb.generate(…, logprobs=5)`` returns, or a magic.
    title
        What stands above it.

    Raises
    ------
    ValueError
        The answer has no log-probabilities.
    """

    def __new__(cls, answer: Answered, **_options: Any) -> TokensView:
        """Refuse before there is a widget, as a half-made one could not be closed."""
        if answer.logprobs is None:
            raise ValueError(
                "this answer has no log-probabilities: ask with logprobs=5, or --logprobs 5 in a cell"
            )
        made: TokensView = super().__new__(cls)
        return made

    def __init__(self, answer: Answered, *, title: str = "") -> None:
        self._given: Sequence[TokenLogprob] = answer.logprobs or ()
        self._reason = answer.finish_reason
        super().__init__(title, max((len(token.top) for token in self._given), default=0))

    def _read(self) -> Mapping[str, Any]:
        self._taken.take(self._given)
        self._band["state"] = _STATES.get(self._reason, "finished")
        return super()._read()

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Nothing changes, so no view is waited for, and there is no thread."""
        if isinstance(parse_message(content), AllTokens):
            self.send_state("tokens")


class GrowingTokens(_TokenWidget):
    """An answer that is being written. Every method may be called from any thread, and returns at once.

    Parameters
    ----------
    title
        What stands above it.
    k
        Alternatives that each token has.
    """

    def __init__(self, title: str, k: int) -> None:
        self._lock = threading.RLock()
        self._latest: Sequence[TokenLogprob] = ()
        super().__init__(title, k)

    def say(self, note: str) -> None:
        """Say what goes on before the answer begins."""
        self._band["note"] = note

    def take(self, answer: Answered) -> None:
        """Note how far the answer has come."""
        self._latest = answer.logprobs or ()

    def end(self, answer: Answered) -> None:
        """Show how the answer ended, for good. May be called twice."""
        if not self._ending.alive:
            return
        self._ending()
        self.take(answer)
        with self._lock:
            self._band["state"] = _STATES.get(answer.finish_reason, "finished")
            self._band["note"] = ""
            self._publish()
            self.send_state("tokens")  # what a page keeps, and what one that opens later is given
        self._keep(now=True)

    def keep(self) -> None:
        """Put the snapshot into the notebook once more, on behalf of the cell that runs now."""
        self._kept = ""
        self._keep(now=True)

    def _publish(self) -> None:
        with self._lock:
            before = self._taken.take(self._latest)
            new = self._taken.items[before:]
            if new:
                news: NewTokens = {"kind": "tokens", "start": before, "tokens": new}
                self.send(news)
            super()._publish()

    def _act(self, asked: Asked) -> None:
        if isinstance(asked, AllTokens):
            with self._lock:
                self.send_state("tokens")

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        if self._ending.alive:
            super()._receive(widget, content, buffers)
        else:  # the thread has ended
            asked = parse_message(content)
            if isinstance(asked, AllTokens):
                self._act(asked)
