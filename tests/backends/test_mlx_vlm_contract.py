"""What of mlx-vlm's is worked around. A test that fails tells of something mended: then the workaround can go."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.utils import prepare_inputs
from PIL import Image
from vlm_models import FAMILIES, chat, tiny_vlm

from mlx_nb.backends.vision import PLACED
from mlx_nb.backends.vision_inputs import NEWLINES_BY_TILE, ONE_PICTURE, UNPADDED


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def inputs(family: str, text: str, numbers: Sequence[int] = (1,)) -> dict[str, Any]:
    _, processor = tiny_vlm(family)
    made = dict(processor(text=[text], images=[picture(number) for number in numbers], return_tensors="np"))
    return {name: mx.array(v) if hasattr(v, "shape") else v for name, v in made.items()}


def embeddings(family: str, made: dict[str, Any]) -> mx.array:
    model, _ = tiny_vlm(family)
    known = {
        name: v for name, v in made.items() if name not in ("input_ids", "pixel_values", "attention_mask")
    }
    out = model.get_input_embeddings(
        made["input_ids"], made["pixel_values"], mask=made["attention_mask"], **known
    )
    result: mx.array = out.inputs_embeds
    return result


@pytest.mark.parametrize("family", sorted(UNPADDED))
def test_a_processor_refuses_padding(family: str) -> None:
    _, processor = tiny_vlm(family)
    with pytest.raises(ValueError, match="padding"):
        prepare_inputs(processor, images=[picture(1)], prompts=chat(family, "What?", images=1))


@pytest.mark.parametrize("family", sorted(NEWLINES_BY_TILE))
def test_a_model_makes_other_numbers_of_embeddings_than_its_processor_of_tokens(family: str) -> None:
    made = inputs(family, chat(family, "What?", images=1))
    assert embeddings(family, made).shape[1] != made["input_ids"].shape[1]


@pytest.mark.parametrize("family", sorted(PLACED))
def test_a_model_puts_what_it_sees_where_the_prompt_begins(family: str) -> None:
    model, _ = tiny_vlm(family)
    token = model.config.image_token_index

    def seen(text: str) -> mx.array:
        made = inputs(family, text)
        first = made["input_ids"].flatten().tolist().index(token)
        return embeddings(family, made)[0, first]

    place = FAMILIES[family].image
    assert not mx.allclose(seen(f"{place}What?"), seen(f"word {place}What?"))


@pytest.mark.parametrize("family", sorted(ONE_PICTURE))
def test_a_model_fails_on_a_second_picture_or_does_not_look_at_it(family: str) -> None:
    text = chat(family, "What?", images=2)
    try:
        seen = [embeddings(family, inputs(family, text, [1, second])) for second in (2, 3)]
    except (ValueError, RuntimeError):
        return
    assert mx.array_equal(*seen)


def test_recurrent_layers_do_not_ask_where_a_padded_prompt_ends() -> None:
    """Of an empty batch mlx-vlm notes that no row is padded, and then looks at no row's length."""
    model, _ = tiny_vlm("qwen3_5")
    language = model.language_model
    short, long = list(range(20, 30)), list(range(40, 64))

    def prefilled(rows: list[list[int]]) -> list[Any]:
        longest = max(map(len, rows))
        blank = [language.make_cache() for _ in rows]
        caches = [cache.merge([own[i] for own in blank]) for i, cache in enumerate(blank[0])]
        lengths = [len(row) for row in rows]
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
        padded = mx.array([row + [0] * (longest - len(row)) for row in rows])
        language(
            padded, cache=caches, position_ids=mx.broadcast_to(mx.arange(longest), (3, len(rows), longest))
        )
        for cache in caches:
            cache.finalize()
        return [cache.extract(0) for cache in caches]

    alone, beside = prefilled([short]), prefilled([short, long])
    assert not mx.allclose(alone[0].cache[1], beside[0].cache[1], atol=1e-3)


def test_a_prompt_that_attends_both_ways_is_not_cut() -> None:
    model, _ = tiny_vlm("paligemma")
    assert not model.chunked_prefill_policy()
    for family in set(FAMILIES) - {"paligemma"}:
        model, _ = tiny_vlm(family)
        policy = getattr(model.language_model, "chunked_prefill_policy", None)
        assert policy is None or policy()
