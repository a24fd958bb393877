"""The async iterator over one request's outputs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..outputs import RequestOutput
from .answer import Answer, Cursor
from .waiting import LoopNews

if TYPE_CHECKING:
    from .core import EngineCore

__all__ = ["OutputStream"]


class OutputStream:
    """Outputs of one request, in order, for one ``async for``.

    A class and not an async generator: however it is left (break, aclose, cancellation, or never begun), the
    request is aborted as soon as nobody holds the iterator, not when some loop gets round to it.
    """

    def __init__(self, core: EngineCore, answer: Answer, interval: float, timeout: float | None) -> None:
        self._core = core
        self._answer = answer
        self._interval = interval
        self._timeout = timeout
        self._cursor = Cursor()
        self._news: LoopNews | None = None
        self._open = True

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._open:
            raise StopAsyncIteration
        answer, cursor = self._answer, self._cursor
        try:
            if (news := self._news) is None:
                news = self._news = LoopNews(answer, self._interval)
            while (output := answer.take(cursor)) is None:
                if self._timeout is None:
                    await news.coming()
                else:
                    await self._in_time(news, self._timeout)
            if output.error is not None:
                raise output.error
        except BaseException:
            self._close()
            raise
        if output.finished:
            self._close()
        return output

    async def _in_time(self, news: LoopNews, timeout: float) -> None:
        try:
            await asyncio.wait_for(news.coming(), timeout)
        except TimeoutError:
            raise TimeoutError(f"no output within {timeout} s; the request was aborted") from None

    async def aclose(self) -> None:
        """Leave the stream; a request that is still live is aborted."""
        self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            if self._news is not None:
                self._news.close()
            self._core.release(self._answer)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._close()
