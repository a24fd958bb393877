"""Greedy answers are those of mlx_lm.stream_generate alone, in any company and however they are asked for."""

import asyncio
import functools
import threading
from typing import Any

import mlx_lm
import pytest
from models import FAMILIES
from scripts import until

from mlx_nb import AsyncEngineCore, EngineCore, RequestOutput, SamplingParams
from mlx_nb.backends.batch import BatchBackend
from mlx_nb.footprint import KVFootprint

LENGTH = 24
SENTENCE = "ten jolly foxes judge my 12 vows of quartz and read a tiny corpus aloud in the engine room"
WORDS = SENTENCE.split()
# From 1 to about 150 tokens: below, at and far beyond the sliding windows of the tiny models.
PROMPTS = ["a", "Hello", *(" ".join(WORDS[:n]) + "?" for n in (2, 4, 7, 11, 18)), " ".join(WORDS * 3)]
# Each kind of cache: of every token; with linear attention; with sliding windows; state space only; both side by
# side in a layer; and the one whose prompts are prefilled alone.
KINDS = ["llama", "qwen3_5", "gemma3", "mamba2", "falcon_h1", "nemotron_h"]


def greedy(length: int = LENGTH, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0, **changes)


@pytest.fixture(scope="session")
def alone(load: Any) -> Any:
    """What mlx-lm answers to one prompt on its own: token ids and text."""

    @functools.cache
    def answer(family: str, prompt: str | tuple[int, ...], length: int = LENGTH) -> tuple[list[int], str]:
        model, tokenizer = load(family)
        given = prompt if isinstance(prompt, str) else list(prompt)
        responses = list(mlx_lm.stream_generate(model, tokenizer, given, max_tokens=length))
        if responses[-1].finish_reason == "stop":  # its last response repeats the end token
            return [r.token for r in responses[:-1]], "".join(r.text for r in responses)
        return [r.token for r in responses], "".join(r.text for r in responses)

    return answer


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.output_token_ids for output in outputs]


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_few_prompts_equal_each_alone(size: int, family: str, start: Any, alone: Any) -> None:
    engine = start(family, enable_prefix_cache=False)
    for first in (1, 5):
        prompts = PROMPTS[first : first + size]
        outputs = engine.generate_batch_sync(prompts, greedy())
        assert ids(outputs) == [alone(family, prompt)[0] for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_33_rows_at_once_equal_each_alone(family: str, start: Any, alone: Any) -> None:
    engine = start(family, completion_batch_size=64)
    prompts = [*PROMPTS * 4, PROMPTS[6]]
    lengths = [LENGTH - place % 5 for place in range(33)]
    outputs = engine.generate_batch_sync(prompts, [greedy(length) for length in lengths])
    assert ids(outputs) == [
        alone(family, prompt)[0][:length] for prompt, length in zip(prompts, lengths, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_prompts_equals_each_alone(family: str, start: Any, alone: Any) -> None:
    outputs = start(family).generate_batch_sync(PROMPTS, greedy())
    assert ids(outputs) == [alone(family, prompt)[0] for prompt in PROMPTS]
    assert all(len(output.output_token_ids) == LENGTH or output.finish_reason == "stop" for output in outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_run_equals_the_first_and_reports_its_cached_tokens(
    family: str, start: Any, alone: Any
) -> None:
    engine = start(family)
    expected = [alone(family, prompt)[0] for prompt in PROMPTS]
    engine.generate_batch_sync(PROMPTS, greedy())
    again = engine.generate_batch_sync(PROMPTS, greedy())
    assert ids(again) == expected
    assert [output.cached_tokens for output in again] == [output.prompt_tokens - 1 for output in again]


@pytest.mark.parametrize("family", KINDS)
def test_prompts_that_share_a_beginning_equal_each_alone(family: str, start: Any, alone: Any) -> None:
    engine = start(family)
    shared = " ".join(WORDS * 2)
    prompts = [shared, f"{shared} and on", f"{shared} or not", shared[:60], f"{shared[:60]} but other"]
    for prompt in prompts:
        output = engine.generate_sync(prompt, greedy())
        assert output.output_token_ids == alone(family, prompt)[0]


@pytest.mark.parametrize("family", KINDS)
def test_a_conversation_that_goes_on_equals_a_fresh_one(family: str, start: Any, alone: Any) -> None:
    engine = start(family)
    prompt = " ".join(WORDS)
    for turn in range(3):
        output = engine.generate_sync(prompt, greedy())
        assert output.output_token_ids == alone(family, prompt)[0]
        assert (output.cached_tokens > 0) == (turn > 0)
        prompt = f"{prompt}{output.output_text} and turn {turn}"


@pytest.mark.parametrize("family", KINDS)
def test_checkpoints_at_a_prefix_boundary_change_nothing(family: str, start: Any, alone: Any) -> None:
    engine = start(family)
    system = " ".join(WORDS) + "\n"
    boundary = len(engine.codec.encode(system))
    for question in ("first", "second one", "a third"):
        output = engine.generate_sync(system + question, greedy(), prefix_boundary=boundary)
        assert output.output_token_ids == alone(family, system + question)[0]
    assert output.cached_tokens >= boundary - 1


@pytest.mark.parametrize("family", KINDS)
async def test_late_arrivals_disturb_nobody(family: str, start: Any, alone: Any) -> None:
    engine: EngineCore = start(family)

    async def arrive(prompt: str, after: int) -> RequestOutput:
        await until(lambda: engine.get_stats()["total_completion_tokens"] >= after)
        return await engine.generate(prompt, greedy())

    outputs = await asyncio.gather(
        *(arrive(prompt, 5 * place) for place, prompt in enumerate(reversed(PROMPTS)))
    )
    assert ids(list(outputs)) == [alone(family, prompt)[0] for prompt in reversed(PROMPTS)]


@pytest.mark.parametrize("family", KINDS)
async def test_neighbours_aborted_in_every_phase_disturb_nobody(family: str, start: Any, alone: Any) -> None:
    engine: EngineCore = start(family, max_num_seqs=6, prefill_step_size=16, max_num_batched_tokens=2048)

    async def abort(request_id: str, phase: str) -> None:
        """Once it is in that phase."""
        await until(lambda: phase in [r["phase"] for r in rows() if r["request_id"] == request_id])
        assert await engine.abort_request(request_id)

    def rows() -> Any:
        return engine.get_stats()["requests"]

    await engine.add_request("a decoding neighbour", greedy(1500, ignore_eos=True), "decodes")
    answers = [asyncio.create_task(engine.generate(prompt, greedy())) for prompt in PROMPTS[:4]]
    await until(lambda: len(rows()) == 5)
    await engine.add_request([7, *[30, 40, 50] * 600], greedy(), "prefills")
    await engine.add_request("a waiting neighbour", greedy(400), "waits")
    answers += [asyncio.create_task(engine.generate(prompt, greedy())) for prompt in PROMPTS[4:]]
    await abort("waits", "waiting")
    await abort("prefills", "prefill")
    await abort("decodes", "decode")
    outputs = await asyncio.gather(*answers)
    assert ids(outputs) == [alone(family, prompt)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", KINDS)
def test_more_prompts_than_slots_equal_each_alone(family: str, start: Any, alone: Any) -> None:
    engine = start(family, max_num_seqs=3, prefill_batch_size=2, prefill_step_size=16)
    outputs = engine.generate_batch_sync(PROMPTS, greedy())
    assert ids(outputs) == [alone(family, prompt)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", KINDS)
def test_answers_of_different_lengths_leave_the_batch_without_harm(
    family: str, start: Any, alone: Any
) -> None:
    lengths = [1, 3, LENGTH, 9, 2, LENGTH, 17, 5]
    outputs = start(family).generate_batch_sync(PROMPTS, [greedy(length) for length in lengths])
    assert ids(outputs) == [
        alone(family, prompt)[0][:length] for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
async def test_streaming_equals_generating(family: str, start: Any, alone: Any) -> None:
    engine: EngineCore = start(family)
    tokens, text = alone(family, PROMPTS[5])
    request_id = await engine.add_request(PROMPTS[5], greedy())
    outputs = [output async for output in engine.stream_outputs(request_id)]
    assert [i for output in outputs for i in output.new_token_ids] == tokens
    assert "".join(output.new_text for output in outputs) == text
    assert outputs[-1].output_text == text
    handle = AsyncEngineCore.over(engine)
    assert (await handle.generate(PROMPTS[5], greedy())).output_text == text
    request_id = engine.submit(PROMPTS[5], greedy())
    assert "".join(output.new_text for output in engine.stream_sync(request_id)) == text


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_greedy_row_beside_hot_rows_stays_greedy(family: str, start: Any, alone: Any) -> None:
    hot = SamplingParams(max_tokens=LENGTH, temperature=1.5, top_p=1, seed=1)
    edited = greedy(repetition_penalty=1.3, presence_penalty=0.5)
    params = [hot, greedy(), hot, greedy(), edited, greedy(), hot, greedy()]
    outputs = start(family).generate_batch_sync(PROMPTS, params)
    for place in (1, 3, 5, 7):
        assert outputs[place].output_token_ids == alone(family, PROMPTS[place])[0]


def test_a_model_with_lazy_arrays_of_its_own_steps_on_another_thread(start: Any, alone: Any) -> None:
    assert start("llama3").generate_sync("Hello", greedy()).output_token_ids == alone("llama3", "Hello")[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_made_room_for_others_go_on_where_they_were(family: str, load: Any, alone: Any) -> None:
    resumed: list[int] = []

    class Small(BatchBackend):
        def insert(self, request: Any, made: Any = ()) -> None:
            if made:
                resumed.append(len(made))
            super().insert(request, made)

    def backend(config: Any, _: Any) -> Small:
        small = Small(*load(family), config)
        # Room for four rows of up to 256 tokens: once the first is longer than that, only for some.
        small.footprint, small.kv_budget = KVFootprint(per_token=1), 4 * 256
        return small

    engine = EngineCore(None, None, backend=backend)
    engine.launch()
    engine.wait_ready()
    prompts = [" ".join(WORDS * 8)[:400], *PROMPTS[4:7]]
    length = 256 - len(engine.codec.encode(prompts[0])) + 8
    assert 40 < length < 60  # so that it is admitted beside the others, and outgrows them
    params = [greedy(length), greedy(length), greedy(LENGTH), SamplingParams(length, 1.0, seed=0)]
    outputs = engine.generate_batch_sync(prompts, params)
    seeded = engine.generate_sync(prompts[3], params[3])
    engine.close()
    assert resumed
    assert ids(outputs[:3]) == [
        alone(family, prompt, p.max_tokens)[0] for prompt, p in zip(prompts[:3], params, strict=False)
    ]
    assert outputs[3].output_token_ids == seeded.output_token_ids


@pytest.mark.parametrize("family", KINDS)
def test_chunks_of_one_token_change_nothing(family: str, start: Any, alone: Any) -> None:
    """In one batch: a prompt on top of a stored prefix, and one whose first chunk is as short by its boundary."""
    engine: EngineCore = start(family, prefill_step_size=16)
    tokens = engine.codec.encode(" ".join(WORDS * 3))
    stored = engine.generate_sync(tokens[:29], greedy(2))
    resumed = [*tokens[:29], *stored.output_token_ids, *tokens[:2]]
    other = [5, *tokens[41:90]]  # nothing stored begins like it
    begun, go = threading.Event(), threading.Event()

    def hold(_: Any, logits: Any) -> Any:  # until both are waiting
        begun.set()
        go.wait(30)
        return logits

    engine.submit("held", greedy(2, logits_processors=[hold]))
    assert begun.wait(30)
    ids = [engine.submit(resumed, greedy()), engine.submit(other, greedy(), prefix_boundary=1)]
    go.set()
    outputs = [list(engine.stream_sync(request_id))[-1] for request_id in ids]
    assert [output.cached_tokens for output in outputs] == [31, 0]
    assert [o.output_token_ids for o in outputs] == [alone(family, tuple(p))[0] for p in (resumed, other)]


@pytest.mark.parametrize("family", KINDS)
def test_what_ran_before_changes_nothing(family: str, start: Any, alone: Any) -> None:
    """Warm-up, answers that ended on a stop string or token, hot and seeded ones, an aborted one."""
    engine: EngineCore = start(family)
    engine.warm_up_now()
    _, text = alone(family, PROMPTS[5])
    cut = engine.generate_sync(PROMPTS[5], greedy(stop=text[len(text) // 2 :][:3]))
    assert (cut.finish_reason, text.startswith(cut.output_text)) == ("stop", True)
    token = alone(family, PROMPTS[4])[0][LENGTH // 2]
    assert engine.generate_sync(PROMPTS[4], greedy(stop_token_ids=[token])).finish_reason == "stop"
    engine.generate_batch_sync(PROMPTS[3:7], SamplingParams(LENGTH, 1.5, seed=1))
    for output in engine.stream_sync(engine.submit(PROMPTS[6], greedy(500, ignore_eos=True))):
        if output.completion_tokens > 3:
            break
    for prompt in PROMPTS[3:7]:
        assert engine.generate_sync(prompt, greedy()).output_token_ids == alone(family, prompt)[0]


@pytest.mark.parametrize("family", KINDS)
def test_saved_prefixes_give_the_same_answers(family: str, start: Any, alone: Any, tmp_path: Any) -> None:
    first = start(family)
    first.generate_batch_sync(PROMPTS, greedy())
    assert first.save_cache_to_disk(tmp_path / "prefixes")
    first.close()
    second = start(family)
    assert second.load_cache_from_disk(tmp_path / "prefixes") > 0
    outputs = second.generate_batch_sync(PROMPTS, greedy())
    assert ids(outputs) == [alone(family, prompt)[0] for prompt in PROMPTS]
    assert all(output.cached_tokens == output.prompt_tokens - 1 for output in outputs)


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_answers_a_batch_twice_and_a_stream_as_it_does_alone(start: Any, alone: Any) -> None:
    engine: EngineCore = start("demo")
    expected = [alone("demo", prompt, 8)[0] for prompt in PROMPTS]
    assert ids(engine.generate_batch_sync(PROMPTS, greedy(8))) == expected
    outputs = engine.generate_batch_sync(PROMPTS, greedy(8))
    assert ids(outputs) == expected
    assert all(output.cached_tokens == output.prompt_tokens - 1 for output in outputs)
    request_id = engine.submit(PROMPTS[4], greedy(8))
    streamed = "".join(output.new_text for output in engine.stream_sync(request_id))
    assert streamed == alone("demo", PROMPTS[4], 8)[1]
