"""Models that see: which folders are, what a prompt with pictures becomes, and what is refused in one line."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from PIL import Image
from vlm_models import FAMILIES, chat, tiny_vlm_folder

from mlx_nb import EngineCore, SamplingParams
from mlx_nb.backends import loader
from mlx_nb.backends.pretrained import Pretrained
from mlx_nb.errors import RequestError
from mlx_nb.prompts.chat import chat_tokens

FAMILY = "qwen2_vl"


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (8, 12, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((84, 56), Image.Resampling.NEAREST)


def started(folder: Path) -> EngineCore:
    engine = EngineCore(None, None, backend=Pretrained(str(folder)))
    engine.launch()
    engine.wait_ready()
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineCore]:
    running = started(tiny_vlm_folder(FAMILY))
    yield running
    running.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a model's folder, to be changed."""
    return Path(shutil.copytree(tiny_vlm_folder(FAMILY), tmp_path / "model"))


def answer(engine: EngineCore, prompt: Any, *numbers: int, **options: Any) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0)
    output = engine.generate_sync(prompt, params, images=[picture(n) for n in numbers] or None, **options)
    return output.output_token_ids


def test_a_model_that_sees_says_so(engine: EngineCore) -> None:
    assert engine.info.takes_images
    assert "float32" in engine.info.precision


def test_the_picture_decides_the_answer(engine: EngineCore) -> None:
    text = chat(FAMILY, "What is it?", images=1)
    assert answer(engine, text, 1) != answer(engine, text, 2)


def test_a_text_without_places_gets_them_before_its_words(engine: EngineCore) -> None:
    place = FAMILIES[FAMILY].image
    assert answer(engine, "What is it?", 1) == answer(engine, f"{place}What is it?", 1)
    assert answer(engine, "Which?", 1, 2) == answer(engine, f"{place * 2}Which?", 1, 2)


def test_a_prompt_in_tokens_has_its_places_too(engine: EngineCore) -> None:
    text = chat(FAMILY, "What is it?", images=1)
    assert answer(engine, engine.codec.encode(text), 1) == answer(engine, text, 1)


@pytest.mark.parametrize("places", [1, 3])
def test_places_and_images_that_differ_in_number_are_refused(places: int, engine: EngineCore) -> None:
    text = chat(FAMILY, "What is it?", images=places)
    with pytest.raises(
        RequestError, match=rf"{places} places? for images and comes with 2 images: write .* once"
    ):
        answer(engine, text, 1, 2)


def test_a_prompt_that_ends_with_its_image_is_refused(engine: EngineCore) -> None:
    bare = "<|image_pad|>"
    with pytest.raises(RequestError, match="ends with its image: ask something after it"):
        answer(engine, f"What is it?{bare}", 1)


def test_images_are_a_list(engine: EngineCore) -> None:
    with pytest.raises(RequestError, match="images must be a list, got str"):
        engine.submit("a", images="cat.png")


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_with_parts_become_the_prompt_of_the_chat_template(family: str) -> None:
    running = started(tiny_vlm_folder(family))
    try:
        parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]
        tokens = chat_tokens(running.codec, [{"role": "user", "content": parts}])
        assert running.codec.image_places(running.codec.decode(tokens)) == 2
        assert running.codec.decode(tokens) == chat(family, "Which?", images=2)
    finally:
        running.close()


def test_a_template_that_knows_of_texts_alone_gets_the_places_in_them(folder: Path) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}[assistant]"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    running = started(folder)
    try:
        parts = [{"type": "image"}, {"type": "text", "text": "Which?"}]
        tokens = chat_tokens(running.codec, [{"role": "user", "content": parts}])
        assert running.codec.decode(tokens) == f"[user]{FAMILIES[FAMILY].image}Which?[assistant]"
    finally:
        running.close()


def test_a_folder_without_a_processor_is_a_text_model(folder: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    running = started(folder)
    try:
        assert not running.info.takes_images
        assert answer(running, chat(FAMILY, "What is it?"))
        with pytest.raises(RequestError, match="takes no images: leave them out"):
            answer(running, chat(FAMILY, "What is it?", images=1), 1)
    finally:
        running.close()


@pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="rotary embeddings are one operation elsewhere"
)
@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "llava", "mistral3"]
)
def test_a_step_of_text_takes_no_more_operations_than_on_the_text_model(family: str, tmp_path: Path) -> None:
    folder = tiny_vlm_folder(family)
    seeing, reading = (loader.load(folder, text_only=text_only).model for text_only in (False, True))
    assert operations(seeing, tmp_path) <= operations(reading, tmp_path)


def operations(model: Any, tmp_path: Path) -> int:
    """Of one decode step."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[5, 6, 7]]), cache=caches), [cache.state for cache in caches])
    mx.export_to_dot(str(tmp_path / "step.dot"), model(mx.array([[8]]), cache=caches))
    return (tmp_path / "step.dot").read_text().count("shape=rectangle")
