"""Answers for the fake backend, and waiting for what other threads do."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlx_nb.backends.fake import EOS, text_tokens
from mlx_nb.request import Request

Script = Callable[[Request], Iterable[int]]


def says(text: str) -> Script:
    """Answer every prompt with `text`, then end."""
    return lambda request: [*text_tokens(text), EOS]


def by_prompt(answers: dict[str, Script]) -> Script:
    """Answer by the prompt's text; other prompts get the word "other"."""

    def script(request: Request) -> Iterator[int]:
        text = bytes(request.prompt_token_ids).decode()
        yield from answers.get(text, says("other"))(request)

    return script


def raises(error: BaseException, after: int = 0) -> Script:
    """Fail after so many tokens."""

    def script(request: Request) -> Iterator[int]:
        yield from itertools.repeat(ord("x"), after)
        raise error

    return script


def for_ever(request: Request) -> Iterator[int]:
    """Answer with x until stopped."""
    return itertools.repeat(ord("x"))


def wait_until(condition: Callable[[], Any], timeout: float = 20) -> None:
    """Block until it holds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.001)


async def until(condition: Callable[[], Any], timeout: float = 20) -> None:
    """Let the loop run until it holds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.001)
