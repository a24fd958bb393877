"""Where the key for a server is from: the environment, or asked for without an echo. Never given as an argument."""

from __future__ import annotations

import getpass
import os
from urllib.parse import urlsplit

from ..errors import MlxNbError
from ..remote import Key

__all__ = ["find_key"]

USUAL = "OPENAI_API_KEY"
_HERE = {"localhost", "127.0.0.1", "::1"}


def find_key(url: str, key_env: str | None = None, *, ask: bool = False) -> Key | None:
    """The key for a server; None if there is none.

    The usual variable is only looked at for servers of this machine or behind TLS: what was set for one server isn't
    sent in the clear to another.

    Parameters
    ----------
    key_env : str, optional
        The environment variable that holds it.
    ask : bool
        Ask for it, where there is somebody to ask.

    Raises
    ------
    MlxNbError
        When the variable isn't set, or nobody answers.
    """
    if ask and key_env is not None:
        raise MlxNbError("the key is from a variable or asked for: give --key-env or --ask-key, not both")
    if ask:
        return _asked_for(url)
    parts = urlsplit(url)
    if key_env is None and not (parts.scheme == "https" or parts.hostname in _HERE):
        return None
    secret = os.environ.get(key_env or USUAL, "").strip()
    if secret:
        return _key(secret, key_env or USUAL)
    if key_env is not None and not key_env.isidentifier():
        raise MlxNbError(
            "--key-env takes the name of an environment variable, never the key: write OPENAI_API_KEY"
        )
    if key_env is not None:
        raise MlxNbError(
            f"the environment variable {key_env} is not set: set it before Jupyter starts, or --ask-key"
        )
    return None


def _asked_for(url: str) -> Key:
    try:
        secret = getpass.getpass(f"Key for {url}: ").strip()
    except (EOFError, NotImplementedError, RuntimeError):  # a kernel that runs without a frontend
        secret = ""
    if not secret:
        raise MlxNbError("no key was given: answer the question, or name a variable by --key-env")
    return _key(secret, "the question")


def _key(secret: str, source: str) -> Key:
    """A key that can be sent: what a header doesn't take would be shown by the error that says so."""
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise MlxNbError(
            f"the key from {source} has spaces, line breaks or letters that no key has: copy it anew"
        )
    return Key(secret, source)
