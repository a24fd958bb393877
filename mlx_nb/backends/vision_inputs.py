"""Prompts with pictures to token ids and pixels, by mlx-vlm's processors.

Runs on the caller's thread: what leaves here is plain Python and NumPy. Knows of no model in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any

from ..errors import RequestError
from ..request import Media, Piece

__all__ = ["MediaReader", "picture_ids", "video_ids"]

UNPADDED = {"llava"}
"""Model types whose processor refuses the padding that mlx-vlm asks it for."""
NEWLINES_BY_TILE = {"llava_next"}
"""Model types of which mlx-vlm takes a picture's tiles whole, and as many newlines as patches after them, whatever
number of tokens its processor makes. A test tells when that is mended."""

ONE_PICTURE = {"paligemma", "llava_next"}
"""Model types of which mlx-vlm shows the model one picture alone, or refuses several."""


class MediaReader:
    """What a model's processor does for a prompt.

    Parameters
    ----------
    processor
        As mlx-vlm loads it.
    config
        The model's, as mlx-vlm reads it.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor = processor
        self._config = config
        self._model_type = str(config.model_type)
        self._image_ids = picture_ids(config)
        self._video_ids = video_ids(config)
        self._lock = threading.Lock()  # a fast tokenizer keeps its padding in itself
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self.place = _place(processor, config)
        known = (getattr(processor, name, None) for name in ("boi_token", "image_token"))
        self._mark = next((mark for mark in known if mark and mark in self.place), self.place)
        # Videos as grids of patches, the way of Qwen. Others are not known to be right: they are refused.
        names = getattr(getattr(processor, "video_processor", None), "model_input_names", ())
        self.takes_videos = bool(self._video_ids) and "video_grid_thw" in names
        self._clip_mark = str(getattr(processor, "video_token", ""))
        self.clip_place = self.place.replace(self._mark, self._clip_mark) if self.takes_videos else ""

    def count(self, text: str) -> int:
        """Places for pictures in a prompt."""
        return text.count(self._mark)

    def lend_template(self, tokenizer: Any) -> None:
        """Let a tokenizer without a chat template have the processor's."""
        if getattr(tokenizer, "chat_template", None) is None:
            template = getattr(self._processor, "chat_template", None)
            if template is not None:
                tokenizer.chat_template = template
                tokenizer.has_chat_template = True  # mlx-lm's wrapper looked before

    def read(self, text: str, pictures: Sequence[Any], clips: Sequence[Any]) -> Media:
        """Token ids with every place widened, pixels, and what the prompt is called in caches.

        A text without places gets them before its first word.

        Raises
        ------
        RequestError
            Places that don't fit the pictures, or what the processor refuses.
        """
        if pictures and clips:
            raise RequestError("images and videos don't go into one prompt: leave one kind out")
        text = self._placed(text, len(pictures), self._mark, self.place, "image")
        text = self._placed(text, len(clips), self._clip_mark, self.clip_place, "video")
        kind, ids = ("video", self._video_ids) if clips else ("image", self._image_ids)
        names = [f"{kind} {each.digest}" for each in (*pictures, *clips)]
        tokens, arrays = self._read(text, pictures, clips)
        places = [i for i, token in enumerate(tokens) if token in ids]
        if not places:
            raise RequestError(f"the prompt has no place for its {_count(len(names), kind)}")
        if places[-1] + 1 == len(tokens):
            raise RequestError(f"the prompt ends with its {kind}: ask something after it")
        pieces = self._apart(names, places, pictures, clips, ids)
        if pieces is None:
            pieces = [Piece("\n".join(names), places, tokens, arrays)]
        keys = list(tokens)
        for piece in pieces:
            for place in piece.places:
                keys[place] = _name(piece.name)
        layout = {name: array for name, array in arrays.items() if not name.startswith("pixel")}
        return Media(tokens, keys, layout, pieces, places[-1] + 1)

    def _apart(
        self,
        names: Sequence[str],
        places: Sequence[int],
        pictures: Sequence[Any],
        clips: Sequence[Any],
        ids: frozenset[int],
    ) -> list[Piece] | None:
        """Each picture or clip on its own; None for a single one, or if they come out otherwise together."""
        if len(names) == 1:
            return None
        if self._model_type in ONE_PICTURE:
            raise RequestError(f"{self._model_type!r} models take one image a prompt: leave the others out")
        ones = [self._read(self.place, [picture], []) for picture in pictures]
        ones += [self._read(self.clip_place, [], [clip]) for clip in clips]
        ends = list(itertools.accumulate(sum(token in ids for token in tokens) for tokens, _ in ones))
        if ends[-1] != len(places):
            return None
        return [
            Piece(name, list(places[begin:end]), tokens, arrays)
            for name, (tokens, arrays), begin, end in zip(names, ones, [0, *ends], ends, strict=False)
        ]

    def _read(
        self, text: str, pictures: Sequence[Any], clips: Sequence[Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """What the processor makes of a prompt: tokens, and NumPy arrays."""
        import numpy as np

        inputs = self._process(text, pictures, clips)
        tokens = [int(token) for token in np.asarray(inputs.pop("input_ids")).reshape(-1)]
        arrays = {name: np.array(value) for name, value in inputs.items() if hasattr(value, "shape")}
        if self._model_type in NEWLINES_BY_TILE:
            tokens = self._by_tile(tokens, arrays)
        return tokens, arrays

    def _placed(self, text: str, number: int, mark: str, place: str, kind: str) -> str:
        """The text with a place for each; before its words where it has none."""
        places = text.count(mark) if place else 0
        if places == number:
            return text
        if places:
            raise RequestError(
                f"the prompt has {_count(places, 'place')} for {kind}s and comes with "
                f"{_count(number, kind)}: write {mark} once for each, or not at all"
            )
        bos = self._bos(text)
        return f"{bos}{place * number}{text.removeprefix(bos)}"

    def _process(self, text: str, pictures: Sequence[Any], clips: Sequence[Any]) -> dict[str, Any]:
        from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

        images = [picture.image for picture in pictures]
        special = not self._bos(text) and should_add_special_tokens(self._model_type, self._processor)
        try:
            with self._lock:
                if self._model_type in UNPADDED:
                    return dict(self._processor(text=[text], images=images))
                more: dict[str, Any] = {"images": images} if images else {}
                if clips:
                    more["videos"] = [_frames(clip) for clip in clips]
                    more["video_metadata"] = [_metadata(clip) for clip in clips]
                return dict(prepare_inputs(self._processor, prompts=text, add_special_tokens=special, **more))
        except Exception as error:
            line = " ".join(str(error).split())[:300] or type(error).__name__
            raise RequestError(
                f"the model's processor refuses this prompt with its {'videos' if clips else 'images'}: {line}"
            ) from error

    def _by_tile(self, tokens: list[int], arrays: dict[str, Any]) -> list[int]:
        """As many tokens for the picture as the model makes embeddings of it; its mask as long."""
        first = next((i for i, token in enumerate(tokens) if token in self._image_ids), None)
        if first is None:
            return tokens
        after = next(i for i in range(len(tokens) - 1, first, -1) if tokens[i] in self._image_ids) + 1
        vision = self._config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        patches += self._config.vision_feature_select_strategy == "full"  # then its class token stays
        count = 2 * arrays["pixel_values"].shape[1] * patches
        widened = [*tokens[:first], *[tokens[first]] * count, *tokens[after:]]
        arrays["attention_mask"] = arrays["attention_mask"][:, :1].repeat(len(widened), axis=1)
        return widened

    def _bos(self, text: str) -> str:
        """The token that the text begins with, if the tokenizer would add it."""
        bos = self._tokenizer.bos_token or ""
        return bos if text.startswith(bos) else ""


def _place(processor: Any, config: Any) -> str:
    """What mlx-vlm writes into a question for one picture; for a template that can't, the bare tokens."""
    from mlx_vlm.prompt_utils import apply_chat_template

    question = "QUESTION"
    with contextlib.suppress(Exception):  # it is the model's own template that runs here
        without, told = (
            str(apply_chat_template(processor, config, question, num_images=number)).split(question, 1)
            for number in (0, 1)
        )
        place = (told[0].removeprefix(without[0]) + told[1].removesuffix(without[1])).strip()
        if place:
            return place
    if bare := getattr(processor, "boi_token", None):
        return str(bare)
    tokenizer = getattr(processor, "tokenizer", processor)
    bare = tokenizer.decode(sorted(picture_ids(config))[:1], skip_special_tokens=False)
    frame = ("<|vision_start|>", "<|vision_end|>")
    return str(bare.join(frame) if set(frame) <= tokenizer.get_vocab().keys() else bare)


def picture_ids(config: Any) -> frozenset[int]:
    """Tokens that stand for pictures, by a model's configuration."""
    return _ids(config, "image_token_id", "image_token_index")


def video_ids(config: Any) -> frozenset[int]:
    """Tokens that stand for frames of a video."""
    return _ids(config, "video_token_id", "video_token_index")


def _ids(config: Any, *names: str) -> frozenset[int]:
    return frozenset(value for name in names if isinstance(value := getattr(config, name, None), int))


def _frames(clip: Any) -> Any:
    """Frames x colours x height x width, all of the first one's size."""
    import numpy as np

    size = clip.frames[0].image.size
    same = (f.image if f.image.size == size else f.image.resize(size) for f in clip.frames)
    return np.stack([np.asarray(image) for image in same]).transpose(0, 3, 1, 2)


def _metadata(clip: Any) -> dict[str, Any]:
    number = len(clip.frames)
    return {"total_num_frames": number, "fps": clip.fps, "frames_indices": list(range(number))}


def _name(digest: str) -> int:
    return -1 - int(hashlib.sha256(digest.encode()).hexdigest()[:15], 16)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
