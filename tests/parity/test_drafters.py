"""A trained drafter decides how fast SimpleEngine answers, and never what."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafter_models import KINDS, family_of, nemotron_with_heads, tiny_pair
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.utils import run_speculative_rounds, speculative_prefill_kwargs
from mlx_vlm.utils import load_model
from models import tiny_folder
from PIL import Image
from vlm_models import chat, tiny_vlm_folder

from mlx_nb import ModelLoadError, SimpleEngine

PROMPT = "ten jolly foxes judge my 12 vows of quartz and read a tiny corpus aloud "
GREEDY: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
MESSAGES = [
    {"role": "system", "content": "Answer in verse. " * 12},
    {"role": "user", "content": "Who are you?"},
]
Open = Callable[..., SimpleEngine]


@pytest.fixture
async def simple() -> AsyncIterator[Open]:
    """Start an engine around a drafter's target, with the drafter or (`plain`) without."""
    engines: list[SimpleEngine] = []

    def make(drafter: str, *, plain: bool = False, agreeable: bool = False, **options: Any) -> SimpleEngine:
        target, own = tiny_pair(drafter, agreeable=agreeable)
        if drafter == "heads" and not plain:
            options = {"mtp": True, "mtp_num_draft_tokens": 3, **options}
        elif not plain:
            options = {"mllm_draft_model": str(own), **options}
        engines.append(SimpleEngine(str(target), **options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
        engine.close()


async def same(one: SimpleEngine, other: SimpleEngine, *prompts: Any, **options: Any) -> Any:
    """The last answer of the second engine, which answers all prompts like the first."""
    for prompt in prompts:
        expected = await one.generate(prompt, **{**GREEDY, **options})
        output = await other.generate(prompt, **{**GREEDY, **options})
        assert output.tokens == expected.tokens
        assert (output.text, output.finish_reason) == (expected.text, expected.finish_reason)
    return output


@pytest.mark.parametrize("drafter", KINDS)
async def test_wrong_guesses_change_nothing(drafter: str, simple: Open) -> None:
    engine = simple(drafter)
    output = await same(simple(drafter, plain=True), engine, "a", PROMPT, PROMPT * 3)
    assert output.mtp_drafts > output.mtp_accepted
    block = engine.get_stats()["mtp"]
    assert block["enabled"]
    assert block["drafts"] >= output.mtp_drafts


@pytest.mark.parametrize("drafter", KINDS)
async def test_right_guesses_are_kept_and_the_target_is_called_less(drafter: str, simple: Open) -> None:
    engine = simple(drafter, agreeable=True)
    output = await same(simple(drafter, plain=True, agreeable=True), engine, PROMPT)
    first = output.tokens[0]
    assert output.tokens == (list(range(first, first + 30)) if first else [0] * 30)
    # The last round may guess beyond the end of the answer.
    assert output.mtp_accepted == output.mtp_drafts > 0
    stats = engine.get_stats()
    assert (stats["mtp"]["drafts"], stats["mtp"]["accepted"]) == (output.mtp_drafts, output.mtp_accepted)
    assert stats["target"]["calls"] <= 1 + 30 / 4 + 1
    for length in (1, 2, 4, 5, 6):
        await same(simple(drafter, plain=True, agreeable=True), engine, PROMPT, max_tokens=length)


@pytest.mark.parametrize("drafter", KINDS)
async def test_guesses_are_those_of_mlx_vlm(
    drafter: str, simple: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round for round, with the prompt read in chunks, and of a round that was wrong nothing left over."""
    target, own = tiny_pair(drafter)
    model = load_model(target)
    trained, kind = load_drafter(str(own))
    assert kind == KINDS[drafter]
    trained.prefer_requested_block_size = True  # mlx-vlm's loop shortens blocks that are mostly wrong
    rounds: list[tuple[int, list[int]]] = []
    draft_block = type(trained).draft_block

    def noted(self: Any, last: int, hidden: Any, cache: Any, size: int, *rest: Any, **more: Any) -> Any:
        block = draft_block(self, last, hidden, cache, size, *rest, **more)
        if size == 4:
            rounds.append((last, block.reshape(-1).tolist()))
        return block

    monkeypatch.setattr(type(trained), "draft_block", noted)
    if hasattr(trained, "draft_block_greedy"):
        monkeypatch.setattr(type(trained), "draft_block_greedy", noted)
    tokens = {"mtp_num_draft_tokens": 3} if drafter == "heads" else {"mllm_draft_block_size": 4}
    engine = simple(drafter, prefill_step_size=16, **tokens)
    await engine.start()
    prompt = engine.tokenizer.encode(PROMPT * 3)
    rounds.clear()
    _speculate(model, trained, kind, prompt)
    theirs = [*rounds]
    rounds.clear()
    await engine.generate(prompt, max_tokens=20, temperature=0)
    # mlx-vlm guesses from the first token of the answer on, this engine for it as well. After a prompt in one pass a
    # sliding window still shows more than its size, once.
    first = 1 if drafter == "assistant" else 0
    assert len(theirs) > 10
    assert rounds[1 + first : 11] == theirs[first:10]


def _speculate(model: Any, drafter: Any, kind: str, prompt: list[int]) -> None:
    """20 tokens by mlx-vlm's own loop, the prompt in one pass: `stream_generate` shows drafters only parts of it."""
    language, tokens = model.language_model, mx.array([prompt])
    state = make_prompt_cache(language)
    shown = language(tokens, cache=state, **speculative_prefill_kwargs(kind, drafter))
    logits = shown.logits[:, -1, :]
    first = mx.argmax(logits, axis=-1)
    rounds = run_speculative_rounds(
        model, drafter, state, tokens, first, logits, shown, draft_kind=kind, max_tokens=20,
        sampler=lambda logits: mx.argmax(logits, axis=-1), draft_block_size=4, sampler_is_greedy=True,
    )  # fmt: skip
    for _ in rounds:
        pass


@pytest.mark.parametrize("agreeable", [False, True])
@pytest.mark.parametrize("drafter", ["heads", "dflash", "assistant"])
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"logit_bias": {42: 4.0}, "logprobs": 2},
    ],
)
async def test_sampling(changes: dict[str, Any], drafter: str, agreeable: bool, simple: Open) -> None:
    plain = simple(drafter, plain=True, agreeable=agreeable)
    await same(plain, simple(drafter, agreeable=agreeable), PROMPT, **changes)


@pytest.mark.parametrize("agreeable", [False, True])
async def test_a_schema_holds(agreeable: bool, simple: Open) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    plain = simple("heads", plain=True, agreeable=agreeable)
    output = await same(plain, simple("heads", agreeable=agreeable), PROMPT, schema=schema, max_tokens=60)
    assert set(json.loads(output.text)) == {"name", "age"}


async def test_a_grammar_that_agrees_with_the_guesses(simple: Open) -> None:
    plain = simple("heads", plain=True, agreeable=True)
    counted = await plain.generate("a", max_tokens=12, temperature=0)
    assert counted.text == "bcdefghijklm", counted
    engine = simple("heads", agreeable=True)
    output = await same(plain, engine, "a", choices=[counted.text, "no"])
    assert output.text == counted.text
    assert output.mtp_accepted > 0


@pytest.mark.parametrize("agreeable", [False, True])
@pytest.mark.parametrize("drafter", ["heads", "eagle3", "assistant"])
async def test_a_stop_string_ends_the_answer_where_it_is(drafter: str, agreeable: bool, simple: Open) -> None:
    plain = simple(drafter, plain=True, agreeable=agreeable)
    text = (await plain.generate(PROMPT, **GREEDY)).text
    stop = text[len(text) // 2 :][:3] or "none"
    output = await same(plain, simple(drafter, agreeable=agreeable), PROMPT, stop=[stop])
    assert stop not in output.text


@pytest.mark.parametrize("agreeable", [False, True])
@pytest.mark.parametrize("drafter", KINDS)
async def test_after_a_system_prompt_that_was_kept(drafter: str, agreeable: bool, simple: Open) -> None:
    plain, engine = simple(drafter, plain=True, agreeable=agreeable), simple(drafter, agreeable=agreeable)
    for question in ("Who are you?", "And who am I?", "And who am I?"):
        messages = [MESSAGES[0], {"role": "user", "content": question}]
        expected = await plain.chat(messages, **GREEDY)
        output = await engine.chat(messages, **GREEDY)
        assert output.tokens == expected.tokens
        assert output.mtp_drafts > 0
        assert (output.mtp_accepted == output.mtp_drafts) is agreeable
    assert output.cached_tokens > 0


@pytest.mark.parametrize("drafter", KINDS)
async def test_after_a_picture(drafter: str, simple: Open) -> None:
    image = Image.new("RGB", (40, 30), (200, 30, 90))
    prompt = chat(family_of(drafter), "What is it, and what is it for?", images=1)
    output = await same(simple(drafter, plain=True), simple(drafter), prompt, prompt, images=[image])
    assert output.mtp_drafts > 0


@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "dflash"])
async def test_a_model_for_text_alone(drafter: str, simple: Open) -> None:
    """It is mlx-vlm's with the drafter, and mlx-lm's without."""
    _, own = tiny_pair(drafter)
    folder = str(tiny_folder("qwen3_5"))
    async with SimpleEngine(folder) as plain, SimpleEngine(folder, mllm_draft_model=str(own)) as engine:
        assert not engine.is_mllm
        output = await same(plain, engine, "a", PROMPT * 3)
    assert output.mtp_drafts > 0


async def test_the_heads_of_a_text_model() -> None:
    folder = str(nemotron_with_heads())
    async with SimpleEngine(folder) as plain, SimpleEngine(folder, mtp=True) as engine:
        output = await same(plain, engine, "a", PROMPT * 3)
    assert output.mtp_drafts == output.completion_tokens - 1  # one a step but the last, and all of them wrong


async def test_nothing_of_a_request_is_left_in_the_drafter(simple: Open) -> None:
    """Its answers are as if it were the first, and so are its guesses."""
    engine = simple("dflash", agreeable=True, enable_cache=False)
    first = await engine.generate(PROMPT, **GREEDY)
    stream = engine.stream_generate(PROMPT * 3, max_tokens=1000, temperature=0)
    async for _ in stream:
        break
    await stream.aclose()
    again = await engine.generate(PROMPT, **GREEDY)
    assert (again.tokens, again.mtp_drafts, again.mtp_accepted) == (
        first.tokens,
        first.mtp_drafts,
        first.mtp_accepted,
    )


async def test_a_fault_of_the_drafter_ends_its_request_and_no_other(
    simple: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = simple("mtp")
    await engine.start()

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no block today")

    trained, _ = load_drafter(str(tiny_pair("mtp")[1]))
    with monkeypatch.context() as patched:
        patched.setattr(type(trained), "draft_block", fail)
        with pytest.raises(ZeroDivisionError, match="no block today"):
            await engine.generate(PROMPT, **GREEDY)
    await same(simple("mtp", plain=True), engine, PROMPT)


async def test_a_bounded_cache(simple: Open) -> None:
    options = {"max_kv_size": 24, "enable_cache": False}
    plain, engine = simple("assistant", plain=True, **options), simple("assistant", **options)
    await same(plain, engine, PROMPT * 3)


async def refusal(model: Any, **options: Any) -> str:
    engine = SimpleEngine(str(model), **options)
    try:
        with pytest.raises(ModelLoadError) as refused:
            await engine.start()
        assert "\n" not in str(refused.value)
        return str(refused.value)
    finally:
        engine.close()


async def test_what_does_not_fit_is_refused_in_one_line() -> None:
    target, drafter = tiny_pair("mtp")
    llama = tiny_folder("llama")
    assert "without prediction heads" in await refusal(tiny_vlm_folder("qwen3_5"), mtp=True)
    assert "without prediction heads" in await refusal(llama, mtp=True)
    assert "kind 'mtp', not 'dflash'" in await refusal(
        target, mllm_draft_model=str(drafter), mllm_draft_kind="dflash"
    )
    assert "is no drafter" in await refusal(target, mllm_draft_model=str(llama))
    for name in ("eagle3", "dflash"):
        _, own = tiny_pair(name)
        assert "don't show what drafters" in await refusal(
            tiny_vlm_folder("qwen3_vl"), mllm_draft_model=str(own)
        )
    _, assistant = tiny_pair("assistant")
    assert "doesn't" in await refusal(target, mllm_draft_model=str(assistant))


async def test_no_code_of_a_folder_runs_unless_it_is_trusted(tmp_path: Path) -> None:
    target, own = tiny_pair("mtp")
    for folder, options in ((target, {}), (own, {"mllm_draft_model": str(tmp_path / "copy")})):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "model_file": "code.py"}))
        (copy / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        model = copy if folder == target else target
        assert "trust_remote_code=True" in await refusal(model, **options)
    assert not (tmp_path / "ran").exists()


async def test_a_folder_without_a_configuration_is_refused_in_one_line(tmp_path: Path) -> None:
    target, own = tiny_pair("mtp")
    shutil.copy(own / "model.safetensors", tmp_path)
    assert "config.json" in await refusal(target, mllm_draft_model=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mllm_draft_kind": "mtp"}, "go with mllm_draft_model"),
        ({"mllm_draft_model": "demo", "mllm_draft_kind": "prompt_lookup"}, "mllm_draft_kind must be one of"),
        ({"mllm_draft_model": "demo", "mllm_draft_block_size": 1}, "mllm_draft_block_size"),
        ({"mtp": True, "mtp_num_draft_tokens": 0}, "draft tokens"),
        ({"mtp": True, "draft_kind": "prompt_lookup"}, "leave out all but one"),
        ({"mtp": True, "specprefill_draft_model": "demo"}, "SpecPrefill doesn't go with a trained drafter"),
        ({"mtp": True, "adapter_path": "tuned"}, "without an adapter"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SimpleEngine("demo", **options)
