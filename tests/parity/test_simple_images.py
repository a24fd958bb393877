"""SimpleEngine over a model that sees says what mlx_vlm.stream_generate says, of pictures and of text alone."""

import asyncio
import gc
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from models import tiny_folder
from pictures import alone, picture, told
from scripts import until
from vlm_models import FAMILIES, chat, tiny_vlm_folder

from mlx_nb import GenerationOutput, RequestError, SimpleEngine

QUESTION = "What is it?"
LONGER = "Sphinx of black quartz, judge my vow, and tell of the picture in words and numbers. " * 2
SYSTEM = {"role": "system", "content": "Answer in verse. " * 12}
# Each way of prefilling and decoding, as in test_images.py.
KINDS = [
    "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "gemma4_both_ways", "paligemma", "smolvlm", "llava",
]  # fmt: skip
SEVERAL = [family for family in FAMILIES if family not in {"paligemma", "llava_next"}]
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0}

Open = Callable[..., SimpleEngine]


@pytest.fixture
async def simple() -> AsyncIterator[Open]:
    engines: list[SimpleEngine] = []

    def make(family: str, **options: Any) -> SimpleEngine:
        engines.append(SimpleEngine(str(tiny_vlm_folder(family)), **options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
        engine.close()


async def ask(engine: SimpleEngine, text: str, *numbers: int, **options: Any) -> GenerationOutput:
    images = [picture(number) for number in numbers] or None
    return await engine.generate(text, **{**GREEDY, **options}, images=images)


@pytest.mark.parametrize("family", FAMILIES)
async def test_pictures_and_texts_in_turn(family: str, simple: Open) -> None:
    engine = simple(family)
    text = chat(family, QUESTION, images=1)
    for prompt, numbers in [
        (text, (1,)), (chat(family, LONGER), ()), (text, (2,)), ("a", ()), (text, (1,)), (chat(family, LONGER), ()),
    ]:  # fmt: skip
        output = await ask(engine, prompt, *numbers)
        assert output.tokens == alone(family, prompt, numbers)[0]
    assert engine.is_mllm
    assert output.cached_tokens == output.prompt_tokens - 1


@pytest.mark.parametrize("family", FAMILIES)
async def test_messages_with_parts_and_images_beside_them_ask_the_same(family: str, simple: Open) -> None:
    engine = simple(family)
    expected = alone(family, chat(family, QUESTION, images=1), (1,))[0]
    image, text = picture(1), {"type": "text", "text": QUESTION}
    for parts, images in [
        ([{"type": "image", "image": image}, text], None), ([{"type": "image"}, text], [image]), (QUESTION, [image]),
    ]:  # fmt: skip
        messages = [{"role": "user", "content": parts}]
        whole = await engine.chat(messages, **GREEDY, images=images)
        assert whole.tokens == expected
        pieces = [o async for o in engine.stream_chat(messages, **GREEDY, images=images)]
        assert "".join(o.new_text for o in pieces) == pieces[-1].text == whole.text


@pytest.mark.parametrize("family", SEVERAL)
async def test_several_pictures_of_different_sizes(family: str, simple: Open) -> None:
    text = chat(family, QUESTION, images=1) + f"Now this one?\n{chat(family, QUESTION, images=1)}"
    images = [picture(1), picture(2, 56, 112)]
    output = await simple(family).generate(text, **GREEDY, images=images)
    assert output.tokens == told(family, text, images)[0]


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("size", [1, 7])
async def test_chunks_of_any_size_without_a_cache(size: int, family: str, simple: Open) -> None:
    engine = simple(family, enable_cache=False, prefill_step_size=size)
    text = chat(family, f"{QUESTION} And why?", images=1)
    for _ in range(2):
        output = await ask(engine, text, 1)
        assert (output.tokens, output.cached_tokens) == (alone(family, text, (1,))[0], 0)


@pytest.mark.parametrize("family", KINDS)
async def test_a_lookup_s_guesses_change_nothing(family: str, simple: Open) -> None:
    engine = simple(family, draft_kind="prompt_lookup")
    await after_pictures_and_texts(engine, family)


@pytest.mark.parametrize(
    ("family", "draft"),
    [("qwen2_vl", "qwen2_vl"), ("qwen3_vl", "qwen2_vl"), ("qwen3_5", "qwen2_vl"), ("llava", "llava")],
)
async def test_a_draft_that_reads_text_alone_changes_nothing(family: str, draft: str, simple: Open) -> None:
    engine = simple(family, draft_model=str(tiny_vlm_folder(draft, 1)))
    await after_pictures_and_texts(engine, family)
    assert engine.get_stats()["mtp"]["drafts"] > 0


async def after_pictures_and_texts(engine: SimpleEngine, family: str) -> None:
    text = chat(family, f"{QUESTION} {QUESTION} {QUESTION}", images=1)
    for number in (1, 2, 1):
        output = await ask(engine, text, number, max_tokens=40)
        assert output.tokens == alone(family, text, (number,), 40)[0]
    output = await ask(engine, chat(family, LONGER), max_tokens=40)
    assert output.tokens == alone(family, chat(family, LONGER), (), 40)[0]


async def test_two_pictures_share_the_system_prompt_before_them(simple: Open) -> None:
    for family in ("llava", "qwen3_vl", "qwen3_5"):
        engine = simple(family)
        lengths = []
        for number in (1, 2):
            question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
            output = await engine.chat([SYSTEM, question], **GREEDY, images=[picture(number)])
            system = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
            assert output.tokens == alone(family, system + chat(family, QUESTION, images=1), (number,))[0]
            lengths.append(output.cached_tokens)
        assert lengths[0] == 0
        assert lengths[1] >= len(engine.tokenizer.encode(system))
        block = engine.get_stats()["system_kv_cache"]
        assert (block["counters"]["hits"], block["counters"]["misses"]) == (1, 1)
        assert block["total_memory_mb"] == pytest.approx(sum(slot["memory_mb"] for slot in block["slots"]))


async def test_a_conversation_that_goes_on_is_not_looked_at_again(simple: Open) -> None:
    engine = simple("qwen2_vl")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "image": picture(1)}, {"type": "text", "text": "A?"}]}
    ]
    for turn in range(3):
        output = await engine.chat(messages, **GREEDY)
        messages += [{"role": "assistant", "content": output.text}, {"role": "user", "content": f"B {turn}?"}]
    assert output.cached_tokens > 40
    stats = engine.get_cache_stats()
    assert stats is not None
    assert (stats["vision_misses"], stats["vision_entries"]) == (1, 1)


@pytest.mark.parametrize("family", KINDS)
async def test_an_abort_comes_between_the_steps_of_a_picture(family: str, simple: Open) -> None:
    engine = simple(family, prefill_step_size=4)
    await engine.start()
    text = chat(family, LONGER * 3, images=1)
    task = asyncio.create_task(ask(engine, text, 1))
    await until(lambda: engine.get_stats()["num_running"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.engine.holder() is None)
    short = chat(family, QUESTION, images=1)
    assert (await ask(engine, short, 1)).tokens == alone(family, short, (1,))[0]
    assert (await ask(engine, text, 1)).tokens == alone(family, text, (1,))[0]


def weights_in_memory() -> int:
    """Bytes of the arrays that modules hold, each counted once."""
    gc.collect()
    modules = [each for each in gc.get_objects() if isinstance(each, nn.Module)]
    arrays = {id(a): a.nbytes for module in modules for a in module.values() if isinstance(a, mx.array)}
    return sum(arrays.values())


async def test_text_and_pictures_are_answered_by_one_copy_of_the_weights(simple: Open) -> None:
    before = weights_in_memory()
    engine = simple("qwen3_vl")
    await ask(engine, chat("qwen3_vl", QUESTION, images=1), 1)
    await ask(engine, chat("qwen3_vl", LONGER))
    weights = engine.get_stats()["memory"]["weights"]
    assert weights <= weights_in_memory() - before < 1.1 * weights


@pytest.mark.parametrize("family", KINDS)
async def test_what_a_bounded_cache_keeps_of_pictures(family: str, simple: Open) -> None:
    text = chat(family, QUESTION, images=1)
    for prompt, numbers in ((text, (1,)), (chat(family, QUESTION), ())):
        unbounded = await ask(simple(family), prompt, *numbers, max_tokens=60, ignore_eos=True)
        size = unbounded.prompt_tokens + 8
        bounded = await ask(
            simple(family, max_kv_size=size, enable_cache=False),
            prompt,
            *numbers,
            max_tokens=60,
            ignore_eos=True,
        )
        expected = alone(family, prompt, numbers, 60, most=size)[0]
        assert bounded.tokens[: len(expected)] == expected
        assert bounded.tokens[:8] == unbounded.tokens[:8]


async def test_a_picture_that_a_bounded_cache_can_not_hold_is_refused(simple: Open) -> None:
    engine = simple("llava", max_kv_size=16)
    with pytest.raises(RequestError, match=r"max_kv_size=16 a prompt of \d+ tokens doesn't fit: raise it"):
        await ask(engine, chat("llava", QUESTION, images=1), 1)
    assert (await ask(engine, chat("llava", LONGER))).completion_tokens > 0


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "llava"])
async def test_specprefill_leaves_pictures_alone_and_says_so(
    family: str, simple: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine = simple(
        family,
        specprefill_enabled=True,
        specprefill_threshold=20,
        specprefill_draft_model=str(tiny_vlm_folder("llava" if family == "llava" else "qwen2_vl", 1)),
        enable_cache=False,
    )
    text = chat(family, LONGER, images=1)
    with caplog.at_level(logging.WARNING, "mlx_nb"):
        assert (await ask(engine, text, 1)).tokens == alone(family, text, (1,))[0]
    block = engine.get_stats()["specprefill"]
    assert (block["requests"], block["fallbacks"]) == (0, 1)
    assert "images and videos are read whole" in block["last_error"]
    assert "images and videos are read whole" in caplog.text
    whole = await ask(engine, chat(family, LONGER), specprefill_keep_pct=1.0)
    assert whole.tokens == alone(family, chat(family, LONGER))[0]
    await ask(engine, chat(family, LONGER), specprefill_keep_pct=0.5)
    assert engine.get_stats()["specprefill"]["requests"] == 2


def as_text_model(family: str, tmp_path: Path) -> str:
    """The family's folder as mlx-lm's model of text: without a processor nothing can be seen."""
    folder = Path(shutil.copytree(tiny_vlm_folder(family), tmp_path / "text"))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    return str(folder)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "llava", "mistral3"])
async def test_text_is_answered_as_by_the_text_model(family: str, simple: Open, tmp_path: Path) -> None:
    draft = str(tiny_vlm_folder(family if family in {"llava", "mistral3"} else "qwen2_vl", 1))
    options: dict[str, Any] = {"specprefill_draft_model": draft, "specprefill_threshold": 20}
    seeing = simple(family, **options)
    async with SimpleEngine(as_text_model(family, tmp_path), **options) as reading:
        assert not reading.is_mllm
        sparse = {"specprefill": True}
        for changes in ({}, {"temperature": 0.9, "seed": 3}, sparse, sparse | {"specprefill_keep_pct": 0.6}):
            ours, theirs = [
                await ask(engine, chat(family, LONGER), max_tokens=24, **changes)
                for engine in (seeing, reading)
            ]
            assert ours.tokens == theirs.tokens
        assert seeing.get_stats()["specprefill"] == reading.get_stats()["specprefill"]


@pytest.mark.parametrize(
    "changes", [{"temperature": 1.2, "seed": 7}, {"frequency_penalty": 2.0}, {"logprobs": 2}]
)
async def test_sampling_controls_are_honoured(changes: dict[str, Any], simple: Open) -> None:
    text = chat("qwen2_vl", QUESTION, images=1)
    plain = await ask(simple("qwen2_vl"), text, 1, **changes)
    guessed = await ask(simple("qwen2_vl", draft_kind="prompt_lookup"), text, 1, **changes)
    assert plain.tokens == guessed.tokens


async def test_a_model_of_text_refuses_images_in_one_line() -> None:
    async with SimpleEngine(str(tiny_folder("llama"))) as engine:
        with pytest.raises(RequestError, match="takes text only: leave images out"):
            await ask(engine, "What?", 1)
        with pytest.raises(RequestError, match="takes text only: leave images out"):
            await engine.chat([{"role": "user", "content": "What?"}], images=[picture(1)])


async def test_force_mllm_takes_a_model_that_sees(simple: Open) -> None:
    async with simple("smolvlm", force_mllm=True) as engine:
        assert engine.is_mllm
        with pytest.raises(RequestError, match="takes text and images only: leave videos out"):
            await engine.generate("What?", videos=[[picture(1), picture(2)]])
