"""Models of mlx-vlm in the batch of mlx-lm: the language part as a text model, and prompts with pictures before it.

A prompt with pictures is prefilled alone, in chunks, up to its last picture; what follows is plain text to the
batch, at positions shifted by what its pictures took. So no family's batching of pictures matters here.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as lm_cache
from mlx_lm.models.cache import trim_prompt_cache

from ..errors import RequestError
from ..request import Media, Piece, Request
from .base import Prefilled
from .chunks import ChunkSize
from .prefix_cache import Look, PrefixCache
from .vision_inputs import picture_ids, video_ids

__all__ = ["Looking", "Sighted"]

Embedded = tuple[mx.array, dict[str, Any]]
UNDERSTOOD = {
    "attention_mask", "attention_mask_4d", "deepstack_visual_embeds", "per_layer_inputs", "position_ids",
    "visual_pos_masks",
}  # fmt: skip
"""What a model may say of a prompt beside its embeddings, to be told when that is prefilled."""
TOLD = {"mm_token_type_ids", "token_type_ids"}
"""What processors say of a prompt's tokens that language parts want to know."""
_DEEP = "deepstack_visual_embeds"
"""What some models add to deeper layers, a level each."""

PLACED = {"paligemma"}
"""Model types of which mlx-vlm puts what it sees to where the prompt begins, wherever the picture's tokens are: what
was seen is good for one place."""


class Sighted:
    """An mlx-vlm model, called as mlx-lm calls its own.

    Attributes
    ----------
    shifts_positions : bool
        Whether pictures take other positions than tokens (Qwen's rotary embedding in three dimensions): calls then
        say how far each row's positions are `shifted`.
    attends_both_ways : bool
        Whether every token of a prompt looks at all others: it is then prefilled in one pass, text alone included.
    prefills_alone : bool
        Whether prompts can't be prefilled side by side: mlx-vlm's recurrent layers don't ask where one ends.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._language = model.language_model
        self.model_type = str(model.config.model_type)
        self.args = getattr(model.config, "text_config", model.config)
        self.layers = self._language.layers
        self.prefills_alone = any(not hasattr(cache, "offset") for cache in self.make_cache())
        self.shifts_positions = callable(getattr(self._language, "get_rope_index", None))
        self.attends_both_ways = not self.takes_chunks({})
        self._picture_ids = picture_ids(model.config) | video_ids(model.config)

    def takes_chunks(self, parts: Mapping[str, Any]) -> bool:
        """Whether a prompt with what `embed` gave beside the embeddings may be prefilled in several passes."""
        for part in (self._model, self._language):
            policy = getattr(part, "chunked_prefill_policy", None)
            if callable(policy):
                verdict = policy(prefill_kwargs=dict(parts))
                return bool(getattr(verdict, "enabled", verdict))
        return not any(getattr(part, "no_chunked_prefill", False) for part in (self._model, self._language))

    @property
    def whole_model(self) -> Any:
        """The model of mlx-vlm."""
        return self._model

    def notes(self) -> list[str]:
        """What people should know of how it is run."""
        if self.attends_both_ways:
            return [
                "its prompts attend both ways: each is prefilled in one pass, and other answers wait meanwhile"
            ]
        if not self.takes_chunks({"mm_token_type_ids": mx.array([[1]])}):
            return ["its images attend both ways: a prompt is prefilled in one pass up to the last of them"]
        if self.prefills_alone:
            return ["its prompts are prefilled one after another"]
        return []

    def whole(self, request: Request) -> Request:
        """A request of a model that attends both ways: its state serves this very prompt, and no longer one."""
        tokens = request.prompt_token_ids
        media = request.media or Media(tokens, tokens, {}, (), 0)
        name = -1 - int(hashlib.sha256(repr(media.keys).encode()).hexdigest()[:15], 16)
        return replace(request, media=replace(media, keys=[name] * len(tokens), last=len(tokens) - 1))

    def parameters(self) -> Any:
        """Of the whole model, its eyes included."""
        return self._model.parameters()

    def modules(self) -> list[Any]:
        """Of the language part."""
        parts: list[Any] = self._language.modules()
        return parts

    def make_cache(self) -> list[Any]:
        """A row's blank caches, as mlx-lm's classes: those are what its batch can merge."""
        make = getattr(self._language, "make_cache", None)
        if make is None:
            return [lm_cache.KVCache() for _ in self.layers]
        return [_of_mlx_lm(cache) for cache in make()]

    def __call__(
        self, tokens: mx.array, cache: list[Any] | None = None, shifted: Sequence[int] | None = None
    ) -> mx.array:
        """Logits, shape (rows, length, vocabulary)."""
        logits: mx.array = self._run(tokens, cache, shifted).logits
        return logits

    def reveal(
        self,
        tokens: mx.array,
        cache: list[Any],
        wants: Mapping[str, Any],
        shifted: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Logits, and the hidden states that a drafter `wants`, shape (rows, length, …); None if it has none to give.

        Parameters
        ----------
        wants : dict
            ``{"return_hidden": True}`` for the last, or ``{"capture_layer_ids": [2, 14]}`` for those after layers,
            side by side.
        """
        out = self._run(tokens, cache, shifted, **wants)
        if not out.hidden_states:
            return out.logits, None
        layers = wants.get("capture_layer_ids")
        if layers is not None:
            complete = len(out.hidden_states) == len(set(layers))
            return out.logits, mx.concatenate(out.hidden_states, axis=-1) if complete else None
        prepare = getattr(self._language, "speculative_draft_hidden", None)
        hidden = out.hidden_states[-1]
        return out.logits, prepare(hidden) if prepare is not None else hidden

    def _run(
        self, tokens: mx.array, cache: list[Any] | None, shifted: Sequence[int] | None, **wants: Any
    ) -> Any:
        more: dict[str, Any] = dict(wants)
        if self.attends_both_ways and cache is not None:
            # Left to itself the model would mask nothing, the padding of shorter rows included.
            more["mask"] = cache[0].make_mask(tokens.shape[1], return_array=True, window_size=None)
        if self.shifts_positions:
            # Always said: left to itself the model goes by what it remembers of the call before.
            more["position_ids"] = _positions(tokens.shape, cache, shifted)
        return self._language(tokens, cache=cache, **more)

    def shift(self, media: Media) -> int:
        """How far the positions after the pictures are from the number of tokens before them."""
        return int(self._rope(media)[1].reshape(-1)[0].item()) if self.shifts_positions else 0

    def _rope(self, media: Media) -> tuple[mx.array, Any]:
        """Positions of the prompt's tokens, and how far those after it are shifted."""
        grids = [
            mx.array(media.arrays[name]) if name in media.arrays else None
            for name in ("image_grid_thw", "video_grid_thw")
        ]
        positions, delta = self._language.get_rope_index(mx.array([media.tokens]), *grids, None)
        return positions, delta

    def name(self, piece: Piece) -> str:
        """What a look at it is remembered by."""
        return f"{piece.name} at {piece.places[0]}" if self.model_type in PLACED else piece.name

    def look(self, piece: Piece) -> Look:
        """What the model sees in it: an embedding for each of its tokens, and those for deeper layers.

        Raises
        ------
        RequestError
            If that is not all there is to it, and so can't be told to a batch.
        """
        known = {name: mx.array(value) for name, value in piece.arrays.items()}
        pixels, mask = known.pop("pixel_values", None), known.pop("attention_mask", None)
        embeddings, parts = self._embed(piece.tokens, pixels, mask=mask, **known)
        if strange := sorted(parts.keys() - UNDERSTOOD):
            raise RequestError(
                f"images of {self.model_type!r} models need {strange[0]} in every step, which a batch can't give: "
                "choose another model for images"
            )
        places = [i for i, token in enumerate(piece.tokens) if token in self._picture_ids]
        if embeddings.shape[1] != len(piece.tokens) or len(places) != len(piece.places):
            raise RequestError(
                f"the model makes {embeddings.shape[1]:,} embeddings of {len(piece.tokens):,} tokens: mlx-vlm can't "
                "place these images"
            )
        levels = enumerate(parts.get(_DEEP) or (), 1)
        look = {"0": embeddings[0, mx.array(places)], **{str(i): level for i, level in levels}}
        mx.eval(look)
        return look

    def embed(self, media: Media, looks: Sequence[Look | None]) -> Embedded:
        """The prompt's embeddings with what was seen in its pieces in place, and what else is to be said of them.

        A piece without a look is left as it is: what comes before it in the cache has it.
        """
        embeddings, parts = self._embed(media.tokens, None)
        shown = [(piece, look) for piece, look in zip(media.pieces, looks, strict=True) if look is not None]
        for piece, look in shown:
            embeddings[0, mx.array(piece.places)] = look["0"]
        if shown and len(shown[0][1]) > 1:
            seen = {place for piece, _ in shown for place in piece.places}
            parts["visual_pos_masks"] = mx.array([[i in seen for i in range(len(media.tokens))]])
            parts[_DEEP] = [
                mx.concatenate([look[str(level)] for _, look in shown])
                for level in range(1, len(shown[0][1]))
            ]
        if self.shifts_positions:
            parts["position_ids"] = self._rope(media)[0]
        told = {name: mx.array(value) for name, value in media.arrays.items() if name in TOLD}
        mx.eval(embeddings, parts)
        return embeddings, {**told, **parts}

    def _embed(self, tokens: Sequence[int], pixels: mx.array | None, **known: Any) -> Embedded:
        out = self._model.get_input_embeddings(mx.array([tokens]), pixels, **known)
        parts = {name: value for name, value in out.to_dict().items() if value is not None}
        parts.pop("rope_deltas", None)
        return parts.pop("inputs_embeds"), parts

    def prefill(
        self,
        media: Media,
        embedded: Embedded,
        state: list[Any],
        begin: int,
        end: int,
    ) -> None:
        """Put the tokens from `begin` to `end` of a prompt with pictures into `state`, which covers those before."""
        embeddings, parts = embedded
        parts = dict(parts)
        for name in parts.keys() & {"position_ids", *TOLD}:
            parts[name] = parts[name][..., begin:end]
        self._language(
            mx.array([media.tokens[begin:end]]),
            inputs_embeds=embeddings[:, begin:end],
            cache=state,
            n_to_process=end - begin,
            logits_to_keep=1,
            **parts,
        )
        mx.eval([cache.state for cache in state])


@dataclass(slots=True)
class Looking:
    """A prompt whose pictures are being prefilled; `done` tokens are in `state`, `cached` of them from before.

    At `boundary`, if it comes before the last picture, the state is kept for other prompts.
    """

    request: Request
    made: tuple[int, ...]
    state: list[Any]
    done: int
    cached: int
    boundary: int = 0
    embedded: Embedded | None = field(default=None, repr=False)
    looks: list[Look | None] = field(default_factory=list, repr=False)
    chunks: bool = True

    @property
    def media(self) -> Media:
        """The pictures."""
        assert self.request.media is not None
        return self.request.media

    def step(self, model: Sighted, size: ChunkSize, known: PrefixCache | None) -> bool:
        """Look, or go on by a chunk; whether that was the last of it."""
        if self.embedded is None:
            if self._look(model, known):
                return False
            self.embedded = model.embed(self.media, self.looks)
        before, began = self.done, time.perf_counter()
        last = self.media.last
        if model.attends_both_ways:
            model.prefill(self.media, self.embedded, self.state, 0, last + 1)
            trim_prompt_cache(self.state, 1)  # the last token is fed again, for what comes after it
            self.done = last
            return True
        end = last
        if self.chunks:
            end = min(self.done + size.tokens, last, *self._ahead())
        model.prefill(self.media, self.embedded, self.state, self.done, end)
        self.done = end
        size.took(end - before, time.perf_counter() - began)
        if end == self.boundary and known is not None:
            known.store(self.request.key(self.media.tokens[:end]), copy.deepcopy(self.state))
        return end == last

    def _ahead(self) -> list[int]:
        return [self.boundary] if self.done < self.boundary < self.media.last else []

    def progress(self) -> Prefilled:
        """How far it has come."""
        total = len(self.request.prompt_token_ids) + len(self.made)
        return Prefilled(self.request.request_id, self.done, total, self.cached)

    def _look(self, model: Sighted, known: PrefixCache | None) -> bool:
        """Look at the next piece that is not known yet; whether there was one. One a step: others wait as long."""
        if not self.looks:
            self.chunks = model.takes_chunks({name: mx.array(v) for name, v in self.media.arrays.items()})
            if not self.chunks and self.done:  # one pass over all of it, or over nothing
                self.state, self.done, self.cached = model.make_cache(), 0, 0
        for piece in self.media.pieces[len(self.looks) :]:
            if piece.places[-1] < self.done:
                self.looks.append(None)
                continue
            look = None if known is None else known.look(model.name(piece))
            if look is not None:
                self.looks.append(look)
                continue
            look = model.look(piece)
            if known is not None:
                known.store_look(model.name(piece), look)
            self.looks.append(look)
            return True
        return False

    def nbytes(self) -> int:
        """Of its state."""
        return sum(int(cache.nbytes) for cache in self.state)


def _of_mlx_lm(cache: Any) -> Any:
    match type(cache).__name__:
        case "KVCache":
            return lm_cache.KVCache()
        case "RotatingKVCache":
            return lm_cache.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
        case _:
            return cache


def _positions(shape: Sequence[int], cache: list[Any] | None, shifted: Sequence[int] | None) -> mx.array:
    rows, length = shape
    offset = next((c.offset for c in cache or () if hasattr(c, "offset")), 0)
    begins = mx.broadcast_to(mx.array(offset).reshape(-1), (rows,))
    if shifted is not None and any(shifted):
        begins = begins + mx.array(list(shifted))
    return mx.broadcast_to(begins[None, :, None] + mx.arange(length), (3, rows, length))
