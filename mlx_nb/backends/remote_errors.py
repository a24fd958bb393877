"""What goes wrong with a server: whether it may pass, how long to wait, and one line that says it.

No error of the client library is passed on, nor linked: those hold the request with its key.
"""

from __future__ import annotations

import email.utils
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from ..errors import MlxNbError, RemoteError, RequestError
from ..remote import Key

__all__ = ["Cut", "Trouble", "pause", "trouble_of"]

_PASSING = {408, 409, 425, 429}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
FAULTS = 4
"""Times that a request is asked which the server fails at: it may be the request's fault."""


class Cut(Exception):
    """A stream that ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that went wrong.

    Attributes
    ----------
    passes : bool
        Whether the same request may go well a little later.
    wait_s : float, optional
        Seconds that the server asks to wait.
    tries : int, optional
        Attempts after which it is clear that it doesn't pass.
    """

    error: MlxNbError
    passes: bool = False
    wait_s: float | None = None
    tries: int | None = None


def pause(attempt: int) -> float:
    """Seconds before the next attempt: doubled each time, and drawn, so that not all come back at once."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def trouble_of(error: Exception, url: str, key: Key | None) -> Trouble:
    """What an exception of the client, or of reading its stream, means."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return _of_status(error, url, key)
    passes = True
    match error:
        case MlxNbError():
            return Trouble(error)
        case Cut():
            said = f"the connection to {url} was lost in the middle of an answer"
        case openai.APITimeoutError():
            said = f"{url} gave no sign of life in time"
        case openai.APIConnectionError():
            said = f"{url} can't be reached ({_cause(error, key)}): is the server running?"
        case json.JSONDecodeError() | openai.APIResponseValidationError() | KeyError() | TypeError():
            said, passes = f"{url} doesn't answer as OpenAI's API does: is it the right URL?", False
        case openai.APIError():
            said, passes = f"{url} ended an answer with an error: {_said(error, key)}", False
        case _:
            said, passes = f"{url}: {type(error).__name__}: {_line(str(error), key)}", False
    return Trouble(RemoteError(said), passes)


def _of_status(error: Any, url: str, key: Key | None) -> Trouble:
    status, said = error.status_code, _said(error, key)
    if status in _PASSING or status >= 500:
        what = "is asked too much" if status == 429 else "fails"
        wait_s, tries = _wait_s(error.response.headers), FAULTS if status == 500 else None
        return Trouble(RemoteError(f"{url} {what} ({status}): {said}"), True, wait_s, tries)
    if status in (401, 403):
        return Trouble(RemoteError(_of_key(status, url, key, said)))
    if said.lower().rstrip(".") in ("not found", "error code: 404"):
        return Trouble(RemoteError(f"{url} has no such address (404): is it the right URL?"))
    return Trouble(RequestError(f"the server refuses the request ({status}): {said}"))


def _of_key(status: int, url: str, key: Key | None, said: str) -> str:
    if key is None:
        return f"{url} asks for a key ({status}): set OPENAI_API_KEY, or connect with --key-env NAME or --ask-key"
    return f"{url} refuses the key from {key.source} ({status}): {said}; correct it and connect again"


def _said(error: Any, key: Key | None) -> str:
    """The server's own words."""
    body = error.body
    if isinstance(body, dict):
        body = body.get("message") or body.get("detail") or body
    return _line(str(body or error.message), key)


def _cause(error: BaseException, key: Key | None) -> str:
    """What is at the root of a connection error."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return _line(str(error), key) or type(error).__name__


def _line(text: str, key: Key | None) -> str:
    text = text if key is None else key.hide(text)
    return " ".join(text.split())[:300]  # a key that is cut would not be known any more


def _wait_s(headers: Any) -> float | None:
    """The seconds of ``Retry-After``, which may be a date."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
