"""Drafters that were trained for a model, as drafts: those of mlx-vlm, and prediction heads that come with a model.

They go by the hidden states of the target, which must be a model of mlx-vlm's. Only their reading and guessing is
used here: what is kept of the guesses is decided where it is for every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..errors import ModelLoadError
from .drafts import Watcher
from .loader import settle
from .vision import Sighted
from .vision_files import require_trust

__all__ = ["load_drafter", "require_heads"]

_MOST = 4
"""Guesses a step of drafters that make them one after another, unless it is said."""


def require_heads(path: Path, name: str) -> None:
    """Refuse a model's folder that holds no prediction heads."""
    from mlx_vlm.speculative.drafters.mtp_split import detect_mtp_splitter

    if detect_mtp_splitter(path) is None:
        raise ModelLoadError(
            f"{name} comes without prediction heads that mlx-vlm knows (conversions leave them out): "
            "leave mtp out, or give a drafter"
        )


def load_drafter(
    path: Path, kind: str | None, target: Sighted, name: str, *, trust_remote_code: bool
) -> tuple[Watcher, int]:
    """A drafter for a target, and the guesses a step that it was trained for.

    Parameters
    ----------
    path
        The drafter's folder, or that of a model with prediction heads.
    kind : str, optional
        "mtp", "dflash" or "eagle3"; None goes by what the folder says.
    name : str
        The drafter's, for messages.

    Raises
    ------
    ModelLoadError
        For a folder that is no drafter, or none of that kind or for that target; and for a target that doesn't show
        what it computes.
    """
    drafter, found = _read(path, name, trust_remote_code)
    if kind not in (None, found):
        raise ModelLoadError(f"{name} is a drafter of kind {found!r}, not {kind!r}: say so, or leave it out")
    _require_fit(drafter, found, target, name)
    settle(drafter)
    draft = _require_shown(drafter, found, target, name)
    size = int(getattr(drafter.config, "runtime_block_size", None) or drafter.config.block_size)
    guesses = max(1, size - 1)  # a block begins with the last token
    return draft, guesses if found == "dflash" else min(guesses, _MOST)


def _read(path: Path, name: str, trust_remote_code: bool) -> tuple[Any, str]:
    from mlx_vlm.speculative.drafters import load_drafter as load

    try:
        require_trust(path, trust_remote_code)
        drafter, kind = load(str(path), lazy=True)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{name} can't be loaded as a drafter ({_line(error)}): choose one that was trained for the model"
        ) from error
    if not callable(getattr(drafter, "draft_block", None)):
        raise ModelLoadError(
            f"{name} is no drafter: give a smaller model as draft_model, with no kind of drafter"
        )
    return drafter, str(kind)


def _require_fit(drafter: Any, kind: str, target: Sighted, name: str) -> None:
    from mlx_vlm.speculative.drafters import validate_drafter_compatibility

    try:
        validate_drafter_compatibility(target.whole_model, drafter, kind)
    except Exception as error:
        raise ModelLoadError(
            f"{name} doesn't fit the model ({_line(error)}): choose the one that was trained for it"
        ) from error


def _require_shown(drafter: Any, kind: str, target: Sighted, name: str) -> Watcher:
    """The drafter as a draft, once the target has shown what it wants, and it has guessed by that."""
    state = target.make_cache()
    tokens = [0, 0]
    try:
        draft = _as_draft(drafter, kind, target)
        _, hidden = target.reveal(mx.array([tokens]), state, draft.wants)
        if hidden is not None:
            draft.begin()
            draft.see(tokens, hidden, state)
            draft.propose([*tokens, 0], 2)
            draft.begin()
            return draft
    except Exception as error:
        raise ModelLoadError(
            f"{name} doesn't work with the model ({_line(error)}): choose the one that was trained for it"
        ) from error
    raise ModelLoadError(
        f"models of type {target.model_type!r} don't show what drafters like {name} go by: leave it out, or choose "
        "another model"
    )


def _as_draft(drafter: Any, kind: str, target: Sighted) -> Watcher:
    if kind == "dflash":
        return _Blocks(drafter, target)
    if callable(getattr(drafter, "accept_verified_tokens", None)):
        return _Heads(drafter, kind, target)
    return _Assistant(drafter, target)


class _Seen:
    """What the target showed of tokens that the drafter hasn't taken in yet."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._hidden: list[mx.array] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Sequence[int], hidden: mx.array) -> None:
        """Of the next tokens."""
        self.tokens += tokens
        self._hidden.append(hidden)

    def take(self, count: int) -> mx.array:
        """The hidden states of the first so many, which are gone then."""
        hidden = self._hidden[0] if len(self._hidden) == 1 else mx.concatenate(self._hidden, axis=1)
        self._hidden = [hidden[:, count:]] if count < len(self) else []
        self.tokens = self.tokens[count:]
        return hidden[:, :count]


class _Keeping:
    """A drafter that takes in later what it was shown."""

    def __init__(self, drafter: Any, target: Sighted) -> None:
        self._drafter, self._target = drafter, target.whole_model
        self.begin()

    def begin(self) -> None:
        """Forget the last request."""
        self._state = self._drafter.reset(self._target)
        self._seen = _Seen()

    def see(self, tokens: Sequence[int], hidden: mx.array, state: Sequence[Any]) -> None:  # noqa: ARG002 - Watcher has it
        """Keep them until it is known what follows, or until it guesses."""
        self._seen.add(tokens, hidden)


class _Heads(_Keeping):
    """A drafter that guesses a token at a time, from the last token and what was computed before it.

    It takes in a token together with the target's hidden state at the one before.
    """

    def __init__(self, drafter: Any, kind: str, target: Sighted) -> None:
        super().__init__(drafter, target)
        layers = getattr(drafter.config, "capture_layer_ids", None)
        self.wants = {"capture_layer_ids": list(layers)} if kind == "eagle3" and layers else _LAST
        self._how = _greedily(drafter)

    def read(self, tokens: Sequence[int], most: int) -> bool:  # noqa: ARG002 - what was seen is what there is
        """Take in what was seen, but for the last, which has nothing after it yet."""
        count = min(len(self._seen) - 1, most)
        if count < 1:
            return False
        self._take(count, self._seen.tokens[1 : count + 1])
        state = getattr(self._drafter, "draft_eval_state", lambda: [cache.state for cache in self._state])
        mx.eval(state())
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """What the heads say, one after another."""
        if not self._seen:
            return []
        hidden = self._take(len(self._seen), [*self._seen.tokens[1:], tokens[-1]])
        made = self._drafter.draft_block(
            tokens[-1], hidden[:, -1:], None, count + 1, _best, mx.int32, **self._how
        )
        return _listed(made, count)

    def _take(self, count: int, following: Sequence[int]) -> mx.array:
        """Feed what follows the next `count` that were seen; what was guessed in vain is taken back there."""
        hidden = self._seen.take(count)
        self._drafter.accept_verified_tokens(
            hidden,
            mx.array([list(following[:-1])], dtype=mx.int32),
            count - 1,
            [following[-1]],
            _best,
            mx.int32,
            **self._how,
        )
        return hidden


class _Assistant:
    """A drafter that looks at the target's own keys and values (Gemma 4's)."""

    wants: dict[str, Any]

    def __init__(self, drafter: Any, target: Sighted) -> None:
        self._drafter, self._target = drafter, target.whole_model
        self.wants = _LAST
        self._layers = [layer.layer_type for layer in target.layers]
        self._how = _greedily(drafter)
        self.begin()

    def begin(self) -> None:
        """Forget the last request."""
        self._drafter.reset(self._target)
        self._hidden: mx.array | None = None
        self._state: Sequence[Any] = ()

    def see(self, tokens: Sequence[int], hidden: mx.array, state: Sequence[Any]) -> None:  # noqa: ARG002 - Watcher has it
        """The last of them is all it takes."""
        self._hidden, self._state = hidden[:, -1:], state

    def read(self, tokens: Sequence[int], most: int) -> bool:  # noqa: ARG002 - Draft has it
        """Nothing: what it looks at is there."""
        return False

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """What it says, one after another, all at the next place."""
        if self._hidden is None:
            return []
        # Layers beyond the caches share those of earlier ones: of each kind, the last that has its own.
        shared = {kind: _in_order(cache) for kind, cache in zip(self._layers, self._state, strict=False)}
        place = len(tokens) - 1
        self._drafter.set_shared_kv(shared, place, position=max(place - 1, 0), kv_valid_len=place)
        made = self._drafter.draft_block(
            tokens[-1], self._hidden, None, count + 1, _best, mx.int32, **self._how
        )
        return _listed(made, count)


class _Blocks(_Keeping):
    """A drafter that fills in a block of tokens at once."""

    def __init__(self, drafter: Any, target: Sighted) -> None:
        super().__init__(drafter, target)
        self.wants = {"capture_layer_ids": list(drafter.config.target_layer_ids)}

    def read(self, tokens: Sequence[int], most: int) -> bool:  # noqa: ARG002 - what was seen is what there is
        """Take in what was seen, but for the last: it guesses by something new."""
        count = min(len(self._seen) - 1, most)
        if count < 1:
            return False
        self._block(self._seen.tokens[count], count, 1)
        mx.eval([cache.state for cache in self._state])
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The block after the last token."""
        return _listed(self._block(tokens[-1], len(self._seen), count), count) if self._seen else []

    def _block(self, token: int, seen: int, count: int) -> mx.array:
        made: mx.array = self._drafter.draft_block(
            token, self._seen.take(seen), self._state, count + 1, _best, mx.int32
        )
        return made


_LAST: dict[str, Any] = {"return_hidden": True}


def _greedily(drafter: Any) -> dict[str, bool]:
    return {"greedy": True} if getattr(drafter, "supports_greedy_draft_argmax", False) else {}


def _best(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def _listed(made: mx.array, count: int) -> list[int]:
    tokens: list[int] = made.reshape(-1)[:count].tolist()  # type: ignore[assignment]
    return tokens


def _in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """Keys and values as they came."""
    if isinstance(cache, RotatingKVCache):
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    assert isinstance(cache, KVCache)
    return cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
