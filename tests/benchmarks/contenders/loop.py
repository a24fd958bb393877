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
        answers = [Answer() for _ in asks]
        began = time.perf_counter()

        async def one(ask: Ask, answer: Answer) -> None:
            if ask.at:
                await asyncio.sleep(ask.at - (time.perf_counter() - began))
            await self.one(ask, answer, began)

        tasks = [asyncio.create_task(one(*pair)) for pair in zip(asks, answers, strict=True)]
        await asyncio.wait(tasks[-1:])
        for ask, task in zip(asks, tasks, strict=True):
            if ask.with_last:
                task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return answers

    @abstractmethod
    async def one(self, ask: Ask, answer: Answer, began: float) -> None:
        """Fill in the answer to a request that arrives now, token by token if it is streamed."""
