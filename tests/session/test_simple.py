"""SimpleEngine: the whole public surface, one request at a time."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from models import tiny, tiny_folder
from scripts import until

from mlx_nb import EngineBusy, EngineStopped, GenerationOutput, ModelLoadError, RequestError, SimpleEngine

PROMPT = "ten jolly foxes judge my 12 vows of quartz"
MESSAGES = [
    {"role": "system", "content": "Answer in verse. " * 12},
    {"role": "user", "content": "Who are you?"},
]
UNUSED = {
    "capacity": 0,
    "in_use": 0,
    "total_memory_mb": 0.0,
    "slots": [],
    "counters": {"hits": 0, "misses": 0, "hit_ratio": 0.0, "evictions": 0, "tokens_saved": 0},
}
CONTRACTED = {
    "engine_type", "model_name", "uptime_seconds", "is_mllm", "loaded", "running", "num_running", "num_waiting",
    "num_requests_processed", "total_prompt_tokens", "total_completion_tokens", "generation_tps", "requests",
    "specprefill", "mtp", "system_kv_cache",
}  # fmt: skip
Open = Callable[..., SimpleEngine]


@pytest.fixture
async def simple() -> AsyncIterator[Open]:
    engines: list[SimpleEngine] = []

    def make(family: str = "llama", kind: Any = "plain", **options: Any) -> SimpleEngine:
        engines.append(SimpleEngine(str(tiny_folder(family, kind=kind)), **options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
        engine.close()


def alone(prompt: Any, length: int, family: str = "llama") -> list[int]:
    model, tokenizer = tiny(family)
    responses = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=length)
    return [r.token for r in responses if r.finish_reason != "stop"]


def test_the_signature_is_the_contract_s() -> None:
    parameters = inspect.signature(SimpleEngine).parameters.values()
    given = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert given == {
        "model_name": inspect.Parameter.empty,
        "trust_remote_code": False,
        "enable_cache": True,
        "force_mllm": False,
        "mtp": False,
        "mtp_num_draft_tokens": 1,
        "prefill_step_size": 2048,
        "specprefill_enabled": False,
        "specprefill_threshold": 8192,
        "specprefill_keep_pct": 0.3,
        "specprefill_backbone_pct": 0.0,
        "specprefill_draft_model": None,
        "max_kv_size": 0,
        "mllm_draft_model": None,
        "mllm_draft_kind": None,
        "mllm_draft_block_size": None,
    }


async def test_it_starts_by_itself_and_streams_what_generate_gives(simple: Open) -> None:
    engine = simple()
    whole = await engine.generate(PROMPT, max_tokens=20, temperature=0)
    assert isinstance(whole, GenerationOutput)
    assert whole.tokens == alone(PROMPT, 20)
    assert (whole.finish_reason, whole.finished, whole.completion_tokens) == ("length", True, 20)
    pieces = [o async for o in engine.stream_generate(PROMPT, max_tokens=20, temperature=0)]
    assert "".join(o.new_text for o in pieces) == pieces[-1].text == whole.text
    assert len(pieces) > 10


async def test_chat_applies_the_template_and_streams_the_same(simple: Open) -> None:
    engine = simple()
    whole = await engine.chat(MESSAGES, max_tokens=12, temperature=0)
    tokens = tiny("llama")[1].apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert whole.tokens == alone(list(tokens), 12)
    pieces = [o async for o in engine.stream_chat(MESSAGES, max_tokens=12, temperature=0)]
    assert pieces[-1].text == whole.text


async def test_the_system_prompt_is_prefilled_once(simple: Open) -> None:
    for family in ("llama", "qwen3_5"):
        engine = simple(family)
        await engine.chat(MESSAGES, max_tokens=4, temperature=0)
        other = [MESSAGES[0], {"role": "user", "content": "What is a fox?"}]
        second = await engine.chat(other, max_tokens=4, temperature=0)
        tokens = tiny(family)[1].apply_chat_template(other, add_generation_prompt=True)
        assert second.cached_tokens > 50
        assert second.tokens == alone(list(tokens), 4, family)
        block = engine.get_stats()["system_kv_cache"]
        assert block["counters"]["hits"] == 1
        assert block["in_use"] == len(block["slots"]) > 0
        assert block["total_memory_mb"] == pytest.approx(sum(slot["memory_mb"] for slot in block["slots"]))


async def test_without_a_cache_nothing_is_kept(simple: Open) -> None:
    engine = simple(enable_cache=False)
    for _ in range(2):
        output = await engine.chat(MESSAGES, max_tokens=2, temperature=0)
        assert output.cached_tokens == 0
    assert engine.get_cache_stats() is None
    assert engine.get_stats()["system_kv_cache"] == UNUSED


async def test_requests_wait_in_order(simple: Open) -> None:
    engine = simple()
    await engine.start()
    ended: list[int] = []

    async def ask(number: int) -> None:
        await engine.generate(PROMPT, max_tokens=5, temperature=0)
        ended.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(ask(number))
            await asyncio.sleep(0)
    assert ended == [0, 1, 2, 3]


async def test_a_call_that_won_t_wait_hears_who_holds_the_engine(simple: Open) -> None:
    engine = simple(admission="fail")
    stream = engine.stream_generate(PROMPT, max_tokens=5000, ignore_eos=True)
    await anext(stream)
    with pytest.raises(EngineBusy, match=r"request engine-.*ten jolly foxes.* s\)"):
        await engine.generate("a")
    waiting = asyncio.create_task(engine.generate("a", max_tokens=1, admission="wait"))
    await stream.aclose()
    assert (await waiting).completion_tokens <= 1
    assert (await engine.generate("a", max_tokens=1)).finish_reason in ("length", "stop")


async def test_cancelling_frees_the_slot(simple: Open) -> None:
    engine = simple(admission="fail")
    await engine.start()
    task = asyncio.create_task(engine.generate(PROMPT, max_tokens=100_000, ignore_eos=True, stop=["\x00"]))
    await until(lambda: engine.get_stats()["num_running"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.engine.holder() is None)
    assert (await engine.generate("a", max_tokens=1)).finished


async def test_stop_ends_what_runs_and_start_works_again(simple: Open) -> None:
    engine = simple()
    await engine.start()
    task = asyncio.create_task(engine.generate(PROMPT, max_tokens=100_000, ignore_eos=True))
    await asyncio.sleep(0.05)
    await engine.stop()
    with pytest.raises(EngineStopped):
        await task
    assert (await engine.generate(PROMPT, max_tokens=3, temperature=0)).tokens == alone(PROMPT, 3)


def test_prepare_for_start_loads_without_a_loop() -> None:
    engine = SimpleEngine(str(tiny_folder("llama")))
    engine.prepare_for_start()
    stats = engine.get_stats()
    assert (stats["engine_type"], stats["loaded"], stats["running"], stats["is_mllm"]) == (
        "simple",
        True,
        True,
        False,
    )
    assert engine.tokenizer.encode("a")
    engine.close()


async def test_statistics_have_the_same_keys_before_there_is_a_model(simple: Open) -> None:
    engine = simple(enable_cache=False)
    before = engine.get_stats()
    assert before["loaded"] is before["mtp"]["enabled"] is before["specprefill"]["enabled"] is False
    assert before["system_kv_cache"] == UNUSED
    await engine.generate(PROMPT, max_tokens=2)
    after = engine.get_stats()
    assert after.keys() >= before.keys()
    for block in ("target", "mtp", "specprefill", "system_kv_cache"):
        assert after[block].keys() == before[block].keys()
    assert before.keys() >= CONTRACTED


async def test_stops_grammars_and_seeds_are_the_engine_s(simple: Open) -> None:
    engine = simple()
    picked = await engine.generate(PROMPT, max_tokens=20, temperature=0, choices=["yes", "no"])
    assert picked.parsed in ("yes", "no")
    one, two = [await engine.generate(PROMPT, max_tokens=12, temperature=1.0, seed=4) for _ in range(2)]
    assert one.text == two.text


async def test_tools_are_called(simple: Open) -> None:
    engine = simple(kind="thinks")
    tool = {
        "type": "function",
        "function": {"name": "double", "parameters": {"type": "object", "properties": {}}},
    }
    await engine.start()
    ids = engine.tokenizer.encode('<tool_call>{"name": "double", "arguments": {}}</tool_call>')
    script = iter([*ids, *engine.tokenizer.eos_token_ids])

    def say(_: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == next(script), logits, -mx.inf)

    output = await engine.chat(MESSAGES, max_tokens=60, temperature=0, tools=[tool], logits_processors=[say])
    assert output.tool_calls == [{"name": "double", "arguments": {}}]
    assert output.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "options",
    [
        {"draft_kind": "prompt_lookup"},
        {"draft_model": "self"},
        {"draft_model": "self", "num_draft_tokens": 2},
    ],
)
async def test_drafts_by_name(options: dict[str, Any], simple: Open) -> None:
    if "draft_model" in options:
        options = {**options, "draft_model": str(tiny_folder("llama"))}
    engine = simple(**options)
    prompt = PROMPT * 4
    output = await engine.generate(prompt, max_tokens=30, temperature=0)
    assert output.tokens == alone(prompt, 30)
    block = engine.get_stats()["mtp"]
    assert block["enabled"]
    assert (block["drafts"], block["accepted"]) == (output.mtp_drafts, output.mtp_accepted)


async def test_a_draft_of_another_vocabulary_is_refused(simple: Open) -> None:
    engine = simple(draft_model=str(tiny_folder("llama", kind="thinks")))
    with pytest.raises(ModelLoadError, match="another vocabulary"):
        await engine.start()


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "mamba2"])
async def test_a_draft_that_forgets_is_refused(family: str, simple: Open) -> None:
    engine = simple(draft_model=str(tiny_folder(family)))
    with pytest.raises(ModelLoadError, match="can't be cut back: choose one with plain attention"):
        await engine.start()


async def test_specprefill_by_name(simple: Open) -> None:
    engine = simple(
        specprefill_enabled=True,
        specprefill_threshold=100,
        specprefill_draft_model=str(tiny_folder("llama", seed=3)),
        enable_cache=False,
    )
    long = list(range(3, 300))
    full = await engine.generate(long, max_tokens=8, temperature=0, specprefill=False)
    all_of_it = await engine.generate(long, max_tokens=8, temperature=0, specprefill_keep_pct=1.0)
    assert all_of_it.text == full.text
    await engine.generate(long, max_tokens=8, temperature=0)
    block = engine.get_stats()["specprefill"]
    assert (block["requests"], block["fallbacks"]) == (2, 0)
    assert block["kept"] == 296 + 2 * 32 + 8  # all; then 3 of 10 chunks, the last of 8 tokens


async def test_a_prompt_of_one_token_has_nothing_to_leave_out(simple: Open) -> None:
    folder = str(tiny_folder("llama"))
    engine = simple(specprefill_enabled=True, specprefill_threshold=0, specprefill_draft_model=folder)
    output = await engine.generate([5], max_tokens=4, temperature=0, ignore_eos=True)
    plain = await engine.generate([5], max_tokens=4, temperature=0, ignore_eos=True, specprefill=False)
    assert output.tokens == plain.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specprefill_enabled": True}, "needs specprefill_draft_model"),
        ({"specprefill_keep_pct": 0}, "specprefill_keep_pct must be above 0"),
        ({"specprefill_backbone_pct": 0.5}, "is part of specprefill_keep_pct"),
        ({"num_draft_tokens": 3}, "goes with draft_model or draft_kind"),
        ({"mtp_num_draft_tokens": 3}, "goes with mtp=True"),
        ({"mtp": "yes"}, "mtp must be"),
        ({"draft_kind": "oracle"}, "kind must be one of"),
        ({"admission": "perhaps"}, "admission must be one of"),
        ({"prefill_step_size": 0}, "prefill_step_size"),
    ],
)
def test_bad_settings_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimpleEngine(str(tiny_folder("llama")), **options)


async def test_bad_calls_are_refused_in_one_line(simple: Open) -> None:
    engine = simple()
    with pytest.raises(ValueError, match="unknown parameter 'temprature'"):
        await engine.generate("a", temprature=1)
    with pytest.raises(RequestError, match="no draft model for SpecPrefill"):
        await engine.generate("a", specprefill=True)
    with pytest.raises(RequestError, match="no draft model for SpecPrefill"):
        await engine.generate("a", specprefill_keep_pct=0.5)
    with pytest.raises(ValueError, match="specprefill must be True or False, got 'no'"):
        await engine.generate("a", specprefill="no")
    for tools in (5, [1], "search"):
        with pytest.raises(ValueError, match="tools must be a list of schemas"):
            await engine.chat(MESSAGES, tools=tools)
    with pytest.raises(RequestError, match="empty"):
        await engine.generate("")
    for messages in ("Hello", ["Hello"], [], [{"content": "Hello"}]):
        with pytest.raises(RequestError, match="messages are a list such as"):
            await engine.chat(messages)
    with pytest.raises(RequestError, match="a part of type 'input_audio': parts are text, image, video"):
        await engine.chat([{"role": "user", "content": [{"type": "input_audio"}]}])
    with pytest.raises(ValueError, match="max_tokens"):
        await engine.generate("a", max_tokens=-1)
    assert (await engine.generate("a", max_tokens=0)).finish_reason == "length"


async def test_force_mllm_refuses_a_text_model(simple: Open) -> None:
    engine = simple(force_mllm=True)
    with pytest.raises(RequestError, match="takes no images"):
        await engine.start()
