"""Where a server is, how it is asked, and the key for it. Validated on construction, never mutated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NoReturn
from urllib.parse import urlsplit

from .validation import choice, integer, number

__all__ = ["Key", "Remote", "ServerKind"]

ServerKind = Literal["openai", "vllm", "vllm-mlx", "mlx-lm"]


class Key:
    """A secret that neither prints nor pickles.

    Attributes
    ----------
    source : str
        Where it is from, for people.
    """

    __slots__ = ("_secret", "source")

    def __init__(self, secret: str, source: str) -> None:
        self._secret, self.source = secret, source

    def reveal(self) -> str:
        """The secret itself, for the one who sends it."""
        return self._secret

    def hide(self, text: str) -> str:
        """The text without the secret."""
        return text.replace(self._secret, "***")

    def __repr__(self) -> str:
        return f"<key from {self.source}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is never written down: connect again where it is needed")


@dataclass(frozen=True, slots=True)
class Remote:
    """A server of OpenAI's API that an engine drives.

    Parameters
    ----------
    url : str
        As of the server's documentation, ``http://localhost:8080/v1``; without a path "/v1" is added.
    model : str, optional
        As the server calls it; None takes the only one it has.
    server : {"openai", "vllm", "vllm-mlx", "mlx-lm"}, optional
        What it is, and so what it understands beside the API's own parameters; None finds out.
    concurrency : int
        Most requests that it has at once.
    timeout_s : float
        Seconds without any sign of life in an answer, after which the connection counts as lost.
    patience_s : float
        Seconds that a request is tried again when the server can't be reached, is too busy or fails.
    key : Key, optional
    """

    url: str
    model: str | None = None
    server: ServerKind | None = None
    concurrency: int = 16
    timeout_s: float = 300.0
    patience_s: float = 120.0
    key: Key | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _server_url(self.url))
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ValueError(f"model is a name that the server knows, got {self.model!r}")
        if self.server is not None:
            choice("server", self.server, ("openai", "vllm", "vllm-mlx", "mlx-lm"))
        integer("concurrency", self.concurrency, low=1)
        number("timeout_s", self.timeout_s, low=0.001)
        number("patience_s", self.patience_s, low=0)


def _server_url(url: str) -> str:
    """The URL as it is used. What is refused isn't shown: there may be a secret in it."""
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except (AttributeError, ValueError):
        raise ValueError("the server's URL can't be read: write http://localhost:8080") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "the server's URL holds a name or password: take it out, and give a key by --key-env or --ask-key"
        )
    if parts.scheme not in ("http", "https") or not host or " " in host:
        raise ValueError("a server's URL begins with http:// or https://: write http://localhost:8080")
    if parts.query or parts.fragment:
        raise ValueError("the server's URL ends with its path: take out what follows ? or #")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
