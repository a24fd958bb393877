"""A driver whose engine is awaited, on one event loop for its whole life."""

import asyncio
import time
from abc import abstractmethod

from ..work import Answer, Ask
from .driver import Driver


class Loop(Driver):
    """Each request is a task of its own, which begins when the request arrives."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, asks: list[Ask]) -> list[Answer]:
        return self._runner.run(self._all(asks))

    async def _all(self, asks: list[Ask]) -> list[Answer]:
        began = time.perf_counter()

        async def one(ask: Ask) -> Answer:
            if ask.at:
                await asyncio.sleep(ask.at - (time.perf_counter() - began))
            return await self.one(ask, began)

        return list(await asyncio.gather(*map(one, asks)))

    @abstractmethod
    async def one(self, ask: Ask, began: float) -> Answer:
        """Return the answer to a request that arrives now."""
