"""What makes two rows the same to a model: a digest of prompt, images, parameters and model."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..request import Chat
from ..sampling import SamplingParams
from .outcome import Ask

__all__ = ["Keys", "repeatable"]

DIGEST_BYTES = 16
PARAMS_KEPT = 1024
"""Digests of parameters that are remembered: rows mostly share them."""


def repeatable(params: SamplingParams) -> bool:
    """Whether the same prompt gives the same answer once more."""
    return params.greedy or params.seed is not None


class Keys:
    """Digests of rows for one model.

    Parameters
    ----------
    fingerprint : str
        Of model, tokenizer and adapter.
    """

    def __init__(self, fingerprint: str) -> None:
        self._model = hashlib.blake2b(fingerprint.encode(), digest_size=DIGEST_BYTES)
        self._begun: dict[int, tuple[SamplingParams, Any]] = {}
        self._drawn: dict[bytes, int] = {}

    def of(self, ask: Ask) -> bytes | None:
        """The digest of a row; None for one with logits processors, which can't be told apart.

        Rows whose answers are drawn afresh are told apart by how many of the same have been asked for.
        """
        params = ask.params
        if params.logits_processors:
            return None
        digest = self._with(params).copy()
        if isinstance(ask.prompt, str):
            digest.update(b"text" + ask.prompt.encode(errors="surrogatepass"))
        elif isinstance(ask.prompt, Chat):
            digest.update(b"chat" + json.dumps(ask.prompt.messages, default=repr).encode())
        else:
            digest.update(array("q", ask.prompt))
        for image in ask.images or ():
            digest.update(f"image {image.digest}".encode())
        if repeatable(params):
            return bytes(digest.digest())
        same = digest.digest()
        number = self._drawn[same] = self._drawn.get(same, 0) + 1
        digest.update(f"sample {number}".encode())
        return bytes(digest.digest())

    def _with(self, params: SamplingParams) -> Any:
        known = self._begun.get(id(params))
        if known is None:
            digest = self._model.copy()
            digest.update(json.dumps(_plain(params), default=repr).encode())
            if len(self._begun) >= PARAMS_KEPT:
                self._begun.clear()
            known = self._begun[id(params)] = (params, digest)  # held, or its id might be another's
        return known[1]


_SPECIAL: dict[str, Callable[[SamplingParams], Any]] = {
    "schema": lambda params: params.json_schema,
    "logit_bias": lambda params: sorted((params.logit_bias or {}).items()),
}


def _plain(params: SamplingParams) -> dict[str, Any]:
    names = (field.name for field in fields(params) if field.name != "logits_processors")
    return {name: _SPECIAL[name](params) if name in _SPECIAL else getattr(params, name) for name in names}
