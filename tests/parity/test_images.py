"""Answers to prompts with pictures are those of mlx_vlm.stream_generate, one prompt at a time, in any company.

That is the reference because mlx-vlm's own batches of pictures are wrong, or fail, in half of the families.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pictures import alone, picture, told
from scripts import until
from vlm_models import FAMILIES, chat, tiny_vlm_folder

from mlx_nb import EngineConfig, EngineCore, RequestError, RequestOutput, SamplingParams, SchedulerConfig
from mlx_nb.backends import loader
from mlx_nb.backends.base import ModelInfo
from mlx_nb.backends.batch import BatchBackend
from mlx_nb.backends.pretrained import Pretrained
from mlx_nb.footprint import KVFootprint

LENGTH = 16
QUESTION = "What is it?"
LONGER = "Sphinx of black quartz, judge my vow, and tell of the picture in words and numbers. " * 2
# Each way of prefilling and decoding: positions in three dimensions, levels added in deeper layers, linear attention,
# sliding windows, inputs by layer, pictures and whole prompts that attend both ways, tiles, and the plain case.
KINDS = [
    "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "gemma4_both_ways", "paligemma", "smolvlm", "llava",
]  # fmt: skip
SEVERAL = [family for family in FAMILIES if family not in {"paligemma", "llava_next"}]
"""Families that take several pictures in a prompt."""

Start = Callable[..., EngineCore]


def greedy(length: int = LENGTH, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0, **changes)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an engine on a family's folder; it ends with the test."""
    engines: list[EngineCore] = []

    def started(family: str, **scheduler: Any) -> EngineCore:
        config = EngineConfig(scheduler_config=SchedulerConfig(**scheduler))
        engine = EngineCore(None, None, config, backend=Pretrained(str(tiny_vlm_folder(family))))
        engines.append(engine)
        engine.launch()
        engine.wait_ready()
        return engine

    yield started
    for engine in engines:
        engine.close()


def ask(engine: EngineCore, text: str, *numbers: int, **options: Any) -> RequestOutput:
    params = options.pop("params", greedy())
    return engine.generate_sync(text, params, images=[picture(n) for n in numbers] or None, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_picture_equals_mlx_vlm(family: str, start: Start) -> None:
    engine = start(family)
    text = chat(family, QUESTION, images=1)
    for number in (1, 2):
        assert ask(engine, text, number).output_token_ids == alone(family, text, (number,))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_equals_mlx_vlm(family: str, start: Start) -> None:
    engine = start(family)
    texts = [chat(family, QUESTION), "a", LONGER, chat(family, LONGER)]
    outputs = engine.generate_batch_sync(texts, greedy())
    assert [output.output_token_ids for output in outputs] == [alone(family, text)[0] for text in texts]


@pytest.mark.parametrize("family", SEVERAL)
def test_several_pictures_in_a_prompt_equal_mlx_vlm(family: str, start: Start) -> None:
    text = chat(family, QUESTION, images=2)
    engine = start(family)
    for numbers in ((1, 2), (2, 1), (2, 2)):
        assert ask(engine, text, *numbers).output_token_ids == alone(family, text, numbers)[0]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_batch_of_texts_and_pictures_equals_each_alone(family: str, start: Start) -> None:
    engine = start(family)
    prompts = [
        (chat(family, LONGER), ()),
        (chat(family, QUESTION, images=1), (1,)),
        (chat(family, QUESTION), ()),
        (chat(family, LONGER, images=1), (2,)),
        (chat(family, QUESTION, images=1), (3,)),
        ("a", ()),
    ]

    async def arrive(place: int, text: str, numbers: tuple[int, ...]) -> RequestOutput:
        await until(lambda: engine.get_stats()["total_completion_tokens"] >= 3 * place)
        return await engine.generate(text, greedy(), images=[picture(n) for n in numbers] or None)

    outputs = await asyncio.gather(*(arrive(i, *prompt) for i, prompt in enumerate(prompts)))
    assert [o.output_token_ids for o in outputs] == [alone(family, *prompt)[0] for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_prompt_is_cached_and_another_picture_of_its_size_is_not(
    family: str, start: Start
) -> None:
    engine = start(family)
    text = chat(family, QUESTION, images=1)
    first, again, other = ask(engine, text, 1), ask(engine, text, 1), ask(engine, text, 2)
    assert again.output_token_ids == first.output_token_ids == alone(family, text, (1,))[0]
    assert again.cached_tokens == again.prompt_tokens - 1
    assert other.output_token_ids == alone(family, text, (2,))[0]
    before = text[: text.index(FAMILIES[family].image)]
    assert other.cached_tokens <= len(engine.codec.encode(before)) + 16  # what frames every picture is shared


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_picture_costs_no_second_look(family: str, start: Start) -> None:
    engine = start(family)
    # Begun in different ways, so that no prefix is found; PaliGemma, which finds none anyway, has its picture first.
    texts = [f"{word} {chat(family, QUESTION, images=1)}" for word in ("first", "other")]
    if family == "paligemma":
        texts = [f"<image>{word}" for word in ("first", "other")]
    for text in texts:
        assert ask(engine, text, 1).output_token_ids == alone(family, text, (1,))[0]
    stats = engine.get_cache_stats()
    assert stats is not None
    assert (stats["vision_misses"], stats["vision_hits"], stats["vision_entries"]) == (1, 1, 1)
    assert ask(engine, texts[0], 2).output_token_ids == alone(family, texts[0], (2,))[0]
    assert engine.get_cache_stats()["vision_misses"] == 2  # type: ignore[index]


@pytest.mark.parametrize("family", KINDS)
def test_without_a_prefix_cache_answers_are_the_same(family: str, start: Start) -> None:
    engine = start(family, enable_prefix_cache=False)
    text = chat(family, QUESTION, images=1)
    for _ in range(2):
        output = ask(engine, text, 1)
        assert (output.output_token_ids, output.cached_tokens) == (alone(family, text, (1,))[0], 0)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("size", [1, 7])
def test_chunks_of_any_size_equal_mlx_vlm(size: int, family: str, start: Start) -> None:
    engine = start(family, prefill_step_size=size)
    text = chat(family, f"{QUESTION} And why?", images=1)
    output = ask(engine, text, 1)
    assert output.output_token_ids == alone(family, text, (1,))[0]


@pytest.mark.parametrize("family", KINDS)
def test_a_conversation_that_goes_on_equals_a_fresh_one(family: str, start: Start) -> None:
    engine = start(family)
    text, cached = chat(family, QUESTION, images=1), []
    for turn in range(3):
        output = ask(engine, text, 1)
        cached.append(output.cached_tokens)
        assert output.output_token_ids == alone(family, text, (1,))[0]
        text += f"{output.output_text}<|im_end|>\n" + chat(family, f"And turn {turn}?")
    assert cached == sorted(cached)


@pytest.mark.parametrize("family", KINDS)
async def test_neighbours_aborted_in_every_phase_disturb_nobody(family: str, start: Start) -> None:
    engine = start(family, prefill_step_size=4, max_num_seqs=8)
    text = chat(family, QUESTION, images=1)

    def rows() -> Any:
        return engine.get_stats()["requests"]

    async def abort(request_id: str, phase: str) -> None:
        await until(lambda: phase in [r["phase"] for r in rows() if r["request_id"] == request_id])
        assert await engine.abort_request(request_id)

    endless = greedy(1500, ignore_eos=True)
    await engine.add_request(chat(family, "a neighbour", images=1), endless, "decodes", images=[picture(5)])
    kept = [asyncio.create_task(engine.generate(text, greedy(), images=[picture(n)])) for n in (1, 2)]
    long = chat(family, f"{LONGER * 4}", images=1)
    await engine.add_request(long, greedy(), "prefills", images=[picture(6)])
    kept.append(asyncio.create_task(engine.generate(chat(family, LONGER), greedy())))
    await abort("prefills", "prefill")
    await abort("decodes", "decode")
    outputs = await asyncio.gather(*kept)
    assert [o.output_token_ids for o in outputs] == [
        alone(family, text, (1,))[0], alone(family, text, (2,))[0], alone(family, chat(family, LONGER))[0],
    ]  # fmt: skip
    stats = engine.get_stats()
    assert (stats["active_requests"], stats["memory"]["kv"]) == (0, 0)


@pytest.mark.parametrize("family", KINDS)
def test_sampling_controls_are_honoured(family: str, start: Start) -> None:
    engine = start(family)
    text = chat(family, QUESTION, images=1)
    hot = SamplingParams(max_tokens=LENGTH, temperature=1.2, top_p=0.95, seed=7)
    seeded = ask(engine, text, 1, params=hot).output_token_ids
    engine.clear_prefix_cache()
    request_ids = [
        engine.submit(chat(family, LONGER), SamplingParams(LENGTH, 1.5, seed=3)),
        engine.submit(text, hot, images=[picture(1)]),
        engine.submit(text, greedy(logprobs=2), images=[picture(2)]),
    ]
    finals = [list(engine.stream_sync(request_id))[-1] for request_id in request_ids]
    assert finals[1].output_token_ids == seeded
    tokens, logprobs = alone(family, text, (2,))
    assert finals[2].output_token_ids == tokens
    said = [entry.logprob for entry in finals[2].logprobs or ()]
    assert said == pytest.approx(logprobs[: len(said)], abs=1e-3)
    barred = tokens[0]
    assert barred not in ask(engine, text, 2, params=greedy(logit_bias={barred: -100.0})).output_token_ids
    penalised = ask(engine, text, 2, params=greedy(frequency_penalty=2.0, presence_penalty=2.0))
    assert len(set(penalised.output_token_ids)) >= len(set(tokens))


@pytest.mark.parametrize("family", KINDS)
def test_answers_stream_on_while_a_picture_is_taken_in(family: str, start: Start) -> None:
    engine = start(family, prefill_step_size=8)
    text = chat(family, LONGER * 3, images=1)
    phases: set[str] = set()
    begun = threading.Event()

    def read() -> None:
        request_id = engine.submit(chat(family, QUESTION), greedy(400, ignore_eos=True))
        for _ in engine.stream_sync(request_id):
            begun.set()
            phases.update(row["phase"] for row in engine.get_stats()["requests"])

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    output = ask(engine, text, 1)
    engine.abort_all()
    reader.join()
    assert "prefill" in phases
    assert output.output_token_ids == alone(family, text, (1,))[0]


@pytest.mark.parametrize("family", SEVERAL)
def test_pictures_of_different_sizes_equal_mlx_vlm(family: str, start: Start) -> None:
    text = chat(family, QUESTION, images=1) + f"Now this one?\n{chat(family, QUESTION, images=1)}"
    engine = start(family)
    images = [picture(1), picture(2, 56, 112)]
    output = engine.generate_sync(text, greedy(), images=images)
    assert output.output_token_ids == told(family, text, images)[0]


@pytest.mark.parametrize("family", ["paligemma", "llava_next"])
def test_a_family_of_one_picture_a_prompt_refuses_several(family: str, start: Start) -> None:
    with pytest.raises(RequestError, match="take one image a prompt: leave the others out"):
        ask(start(family), chat(family, QUESTION, images=2), 1, 2)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "smolvlm"])
def test_a_second_picture_in_a_conversation_is_the_only_one_looked_at(family: str, start: Start) -> None:
    engine = start(family)
    text = chat(family, QUESTION, images=1)
    first = ask(engine, text, 1)
    text += f"{first.output_text}<|im_end|>\n" + chat(family, "And this?", images=1)
    second = ask(engine, text, 1, 2)
    assert second.output_token_ids == alone(family, text, (1, 2))[0]
    assert second.cached_tokens >= first.prompt_tokens - 1
    stats = engine.get_cache_stats()
    assert stats is not None
    assert (stats["vision_misses"], stats["vision_entries"]) == (2, 2)


@pytest.mark.parametrize("family", KINDS)
def test_rows_that_made_room_for_others_go_on_where_they_were(family: str, start: Start) -> None:
    resumed: list[int] = []

    class Small(BatchBackend):
        def insert(self, request: Any, made: Any = ()) -> None:
            if made:
                resumed.append(len(made))
            super().insert(request, made)

    loaded = loader.load(tiny_vlm_folder(family))

    def backend(config: Any, _: Any) -> Small:
        small = Small(loaded.model, loaded.tokenizer, config, ModelInfo(takes_images=True), loaded.reader)
        # Room for three rows of up to 256 tokens: once one is longer than that, only for some.
        small.footprint, small.kv_budget = KVFootprint(per_token=1), 3 * 256
        return small

    engine = EngineCore(None, None, backend=backend)
    engine.launch()
    engine.wait_ready()
    short, long = chat(family, QUESTION, images=1), chat(family, "x" * 200)
    spare = 256 - len(engine.codec.encode(long))
    assert 20 < spare < 100
    request_ids = [
        engine.submit(long, greedy(spare + 12, ignore_eos=True)),
        engine.submit(short, greedy(spare + 8, ignore_eos=True), images=[picture(1)]),
        engine.submit(short, greedy(spare + 8, ignore_eos=True), images=[picture(2)]),
    ]
    outputs = [list(engine.stream_sync(request_id))[-1].output_token_ids for request_id in request_ids]
    engine.close()
    assert resumed
    for output, number in zip(outputs[1:], (1, 2), strict=True):
        expected = alone(family, short, (number,), spare + 8)[0]
        assert output[: len(expected)] == expected


@pytest.mark.parametrize("family", KINDS)
def test_saved_prefixes_of_pictures_give_the_same_answers(family: str, start: Start, tmp_path: Path) -> None:
    text = chat(family, QUESTION, images=1)
    first = start(family)
    ask(first, text, 1)
    assert first.save_cache_to_disk(tmp_path / "prefixes")
    first.close()
    second = start(family)
    assert second.load_cache_from_disk(tmp_path / "prefixes") > 0
    output = ask(second, text, 1)
    assert output.output_token_ids == alone(family, text, (1,))[0]
    assert output.cached_tokens == output.prompt_tokens - 1
    other = ask(second, text, 2)
    assert other.output_token_ids == alone(family, text, (2,))[0]
