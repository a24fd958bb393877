"""Pictures that differ in content alone, and what mlx-vlm says of them, one prompt at a time."""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from vlm_models import tiny_vlm

from mlx_nb.backends.bounded import bounded_cache
from mlx_nb.backends.vision import Sighted


def picture(number: int, width: int = 112, height: int = 84) -> Image.Image:
    """One of many: those of one size differ in content alone."""
    pixels = np.random.default_rng(number).integers(0, 255, (height // 7, width // 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)


@functools.cache
def alone(
    family: str,
    text: str,
    numbers: tuple[int, ...] = (),
    length: int = 16,
    width: int = 112,
    most: int | None = None,
) -> tuple[list[int], list[float]]:
    """What mlx-vlm answers to one prompt: tokens and their log-probabilities; `most` bounds its cache, in tokens."""
    return told(family, text, [picture(number, width) for number in numbers], length, most)


def told(
    family: str, text: str, images: list[Image.Image], length: int = 16, most: int | None = None
) -> tuple[list[int], list[float]]:
    """`alone`, for pictures of several sizes."""
    import mlx_vlm

    model, processor = tiny_vlm(family)
    options: dict[str, Any] = {}
    if images:
        # Called by ourselves: mlx-vlm hands LLaVA's processor an argument that it refuses.
        inputs = dict(processor(text=[text], images=images, return_tensors="np"))
        arrays = {k: v if isinstance(v, int | list) else mx.array(v) for k, v in inputs.items()}
        options = {"mask": arrays.pop("attention_mask"), **arrays}
    if most is not None:
        # mlx-vlm leaves the bound out for models that make their own caches: it must be given its caches.
        options["prompt_cache"] = bounded_cache(Sighted(model), most)
    responses = list(
        mlx_vlm.stream_generate(model, processor, text, max_tokens=length, temperature=0.0, **options)
    )
    tokens = list(responses[-1].token_ids)
    logprobs = [float(r.logprobs[r.token].item()) for r in responses[: len(tokens)]]
    if responses[-1].finish_reason == "stop":
        tokens.pop()
    return tokens, logprobs
