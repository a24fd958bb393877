"""Prompts with pictures to token ids and pixels, by mlx-vlm's processors.

Runs on the caller's thread: what leaves here is plain Python and NumPy. Knows of no model in memory.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import RequestError
from ..request import Media

__all__ = ["MediaReader"]

_PIXELS = ("pixel_values", "pixel_values_videos")


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
        self._model_type = str(config.model_type)
        self._image_ids = _ids(config, "image_token_id", "image_token_index")
        self._video_ids = _ids(config, "video_token_id", "video_token_index")
        self._lock = threading.Lock()  # a fast tokenizer keeps its padding in itself

    def lend_template(self, tokenizer: Any) -> None:
        """Let a tokenizer without a chat template have the processor's."""
        if getattr(tokenizer, "chat_template", None) is None:
            template = getattr(self._processor, "chat_template", None)
            if template is not None:
                tokenizer.chat_template = template

    def read(self, text: str, pictures: Sequence[Any], clips: Sequence[Any]) -> Media:
        """Token ids with every placeholder widened, pixels, and what the prompt is called in caches.

        Raises
        ------
        RequestError
            Placeholders that don't fit the pictures, or what the processor refuses.
        """
        import numpy as np

        if clips:
            raise RequestError("this model takes no videos: leave them out")
        inputs = self._process(text, pictures)
        tokens = [int(token) for token in np.asarray(inputs.pop("input_ids")).reshape(-1)]
        arrays = {name: np.array(value) for name, value in inputs.items() if hasattr(value, "shape")}
        digests = [picture.digest for picture in pictures]
        runs = _named(tokens, self._image_ids, digests)
        seen = [i for i, key in enumerate(runs) if key < 0]
        if not seen:
            raise RequestError(f"the prompt has no place for its {_count(len(pictures), 'image')}")
        last = seen[-1] + 1
        if last == len(tokens):
            raise RequestError("the prompt ends with its image: ask something after it")
        digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        return Media(tokens, runs, arrays, digest, last)

    def _process(self, text: str, pictures: Sequence[Any]) -> dict[str, Any]:
        from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        special = should_add_special_tokens(self._model_type, self._processor) and not begun
        try:
            with self._lock:
                return dict(
                    prepare_inputs(
                        self._processor,
                        images=[picture.image for picture in pictures],
                        prompts=text,
                        add_special_tokens=special,
                    )
                )
        except Exception as error:
            line = " ".join(str(error).split())[:300] or type(error).__name__
            raise RequestError(
                f"the model's processor refuses this prompt with its images: {line}"
            ) from error


def _ids(config: Any, *names: str) -> frozenset[int]:
    return frozenset(value for name in names if isinstance(value := getattr(config, name, None), int))


def _named(tokens: Sequence[int], placeholders: Iterable[int], digests: Sequence[str]) -> list[int]:
    """The prompt as prefixes are kept under: what stands for pictures is a number below zero, of their content."""
    name = -1 - int(hashlib.sha256("\n".join(digests).encode()).hexdigest()[:15], 16)
    wanted = frozenset(placeholders)
    return [name if token in wanted else token for token in tokens]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
