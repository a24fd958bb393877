"""Timeouts, priorities, memory, leaving memory when idle, warming up, adapters, several engines at once."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from models import tiny, tiny_folder
from scripts import for_ever, says, until, wait_until

from mlx_nb import (
    AsyncEngineCore,
    EngineConfig,
    EngineCore,
    EngineNotStarted,
    EngineStopped,
    LoadProgress,
    ModelLoadError,
    RequestError,
    SamplingParams,
)
from mlx_nb.backends.fake import fake_backend

LONG = SamplingParams(max_tokens=4000)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
Make = Any


# -- timeouts -------------------------------------------------------------------------------------------


async def is_over(engine: EngineCore) -> None:
    await until(lambda: engine.get_stats()["num_running"] + engine.get_stats()["num_waiting"] == 0)


async def test_a_request_in_decode_ends_when_its_time_is_up(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    request_id = await engine.add_request("q", LONG, timeout=1)
    seen = ""

    async def read() -> None:
        nonlocal seen
        async for output in engine.stream_outputs(request_id):
            seen += output.new_text

    with pytest.raises(TimeoutError, match="within 1 s"):
        await read()
    assert seen
    await is_over(engine)
    assert (await engine.generate("q", GREEDY)).output_text == "x" * 8


async def test_a_request_in_prefill_ends_when_its_time_is_up(start: Make) -> None:
    engine = start(for_ever, step_s=0.005, config={"prefill_step_size": 1})
    with pytest.raises(TimeoutError):
        await engine.generate("x" * 3000, LONG, timeout=0.1)  # 15 s of prefill
    await is_over(engine)
    assert engine.get_stats()["total_completion_tokens"] == 0


async def test_a_waiting_request_ends_when_its_time_is_up_and_never_runs(start: Make) -> None:
    ran: list[str] = []

    def script(request: Any) -> Any:
        ran.append(request.request_id)
        return for_ever(request)

    engine = start(script, step_s=0.001, config={"max_num_seqs": 1})
    await engine.add_request("q", LONG, "first")
    with pytest.raises(TimeoutError):
        await engine.generate("q", LONG, "second", timeout=0.1)
    assert engine.abort("first")
    await is_over(engine)
    assert ran == ["first"]


async def test_a_request_within_its_time_is_left_alone(start: Make) -> None:
    engine = start(says("in time"), step_s=0.001)
    outputs = await asyncio.gather(*(engine.generate("q", timeout=30) for _ in range(200)))
    assert {output.output_text for output in outputs} == {"in time"}


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"])
async def test_a_timeout_that_is_none_is_refused(timeout: Any, start: Make) -> None:
    engine = start(says("fine"))
    with pytest.raises(ValueError, match="timeout"):
        await engine.generate("q", timeout=timeout)
    assert engine.get_stats()["active_requests"] == 0


# -- who goes first -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_the_policy_decides_who_goes_first(policy: str, start: Make) -> None:
    ran: list[str] = []

    def script(request: Any) -> Any:
        ran.append(request.request_id)
        return iter([ord("x")] * 3)

    engine = start(script, step_s=0.01, config={"max_num_seqs": 1, "policy": policy})
    answers = [asyncio.create_task(engine.generate("q", LONG, "first"))]
    await until(lambda: ran == ["first"])
    for name, priority in (("low", 5), ("urgent", -5), ("usual", 0), ("usual too", 0)):
        answers.append(asyncio.create_task(engine.generate("q", LONG, name, priority=priority)))
        await asyncio.sleep(0)
    await asyncio.gather(*answers)
    asked = ["first", "low", "urgent", "usual", "usual too"]
    assert ran == (asked if policy == "fcfs" else ["first", "urgent", "usual", "usual too", "low"])


async def test_a_long_prompt_is_not_starved_by_short_ones(start: Make) -> None:
    engine = start(says("done"), step_s=0.001, config={"max_num_batched_tokens": 64, "prefill_step_size": 32})
    over = False

    async def ask_on() -> None:
        while not over:
            await engine.generate("short")

    crowd = [asyncio.create_task(ask_on()) for _ in range(4)]
    output = await asyncio.wait_for(engine.generate("x" * 2000), 30)
    over = True
    await asyncio.gather(*crowd)
    assert output.output_text == "done"


# -- memory ---------------------------------------------------------------------------------------------


async def test_a_request_that_can_never_fit_is_refused_at_once(start: Make) -> None:
    engine = start(for_ever, kv_budget=1024)
    with pytest.raises(RequestError, match="shorten the prompt, or lower max_tokens"):
        await engine.generate("q", SamplingParams(max_tokens=2000))
    assert engine.get_stats()["num_requests_processed"] == 0
    assert (await engine.generate("q", SamplingParams(max_tokens=1000))).completion_tokens == 1000


async def test_what_does_not_fit_beside_the_others_waits(start: Make) -> None:
    engine = start(for_ever, step_s=0.001, kv_budget=1024)
    answers = [asyncio.create_task(engine.generate("q", SamplingParams(max_tokens=40))) for _ in range(9)]
    most = 0
    while not all(answer.done() for answer in answers):
        most = max(most, engine.get_stats()["num_running"])
        await asyncio.sleep(0.001)
    assert 1 < most <= 4
    assert {answer.result().completion_tokens for answer in answers} == {40}


# -- idle -----------------------------------------------------------------------------------------------


class Loads:
    """A fake backend that notes when it is loaded and let go."""

    def __init__(self, *script: Any, fail_at: int = 0) -> None:
        self.events: list[str] = []
        self._make = fake_backend(*script)
        self._fail_at = fail_at

    def __call__(self, config: EngineConfig, on_progress: Any) -> Any:
        self.events.append("load")
        if len(self.events) == self._fail_at:
            raise ModelLoadError("the file is gone: fetch it again")
        made: Any = self._make(config, on_progress)
        close = made.close

        def closing() -> None:
            self.events.append("close")
            close()

        made.close = closing
        return made


def idle(loads: Loads, after: float = 0.05) -> EngineCore:
    engine = EngineCore(None, None, EngineConfig(idle_unload_s=after), backend=loads)
    engine.launch()
    engine.wait_ready(10)
    return engine


def test_an_idle_engine_lets_its_model_go_and_the_next_request_loads_it_again() -> None:
    loads = Loads(says("yes"))
    engine = idle(loads)
    for turn in range(1, 4):
        assert engine.generate_sync("q").output_text == "yes"
        wait_until(lambda turn=turn: loads.events == ["load", "close"] * turn)
        assert engine.is_running()
        assert engine.get_stats()["memory"]["active"] == 0
    engine.close()
    assert loads.events == ["load", "close"] * 3
    assert engine.get_stats()["num_requests_processed"] == 3


def test_nothing_is_loaded_for_what_needs_no_model(tmp_path: Path) -> None:
    loads = Loads(says("yes"))
    engine = idle(loads)
    wait_until(lambda: loads.events == ["load", "close"])
    engine.get_stats()
    engine.get_cache_stats()
    engine.clear_prefix_cache()
    assert engine.clear_runtime_caches() == {"prefix_cache_bytes": 0, "pool_bytes": 0}
    assert engine.save_cache_to_disk(tmp_path / "none") is False
    with pytest.raises(RequestError):
        engine.generate_sync("")
    time.sleep(0.05)
    assert loads.events == ["load", "close"]
    engine.close()


@pytest.mark.parametrize("end", ["stop", "close"])
def test_an_unloaded_engine_can_be_stopped_and_started(end: str) -> None:
    loads = Loads(says("yes"))
    engine = idle(loads)
    wait_until(lambda: loads.events == ["load", "close"])
    if end == "close":
        engine.close()
        with pytest.raises(EngineStopped):
            engine.generate_sync("q")
        return
    engine.stop_now(10)
    assert engine.state == "stopped"
    engine.launch()
    assert engine.generate_sync("q").output_text == "yes"
    engine.close()


def test_an_engine_at_work_is_not_unloaded() -> None:
    loads = Loads(lambda request: iter([ord("x")] * 100))
    engine = idle(loads, after=0.001)
    for _ in range(5):
        assert engine.generate_sync("q", LONG).completion_tokens == 100
    assert loads.events[:1] == ["load"]
    assert loads.events.count("load") <= 6
    engine.close()


def test_a_reload_that_fails_tells_who_asked_and_the_engine_can_be_started_again() -> None:
    loads = Loads(says("yes"), fail_at=3)
    engine = idle(loads)
    wait_until(lambda: loads.events == ["load", "close"])
    with pytest.raises(ModelLoadError, match="gone"):
        engine.generate_sync("q")
    wait_until(lambda: engine.state == "failed")
    engine.launch()
    assert engine.generate_sync("q").output_text == "yes"
    engine.close()


def test_an_idle_models_memory_goes_and_its_answers_stay_the_same() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    heard: list[LoadProgress] = []
    handle = AsyncEngineCore.from_pretrained(
        tiny_folder("gpt_oss"), EngineConfig(idle_unload_s=0.2), on_progress=heard.append
    )
    handle.start()
    weights = sum(file.stat().st_size for file in tiny_folder("gpt_oss").glob("*.safetensors"))
    answers = []
    for _ in range(2):
        answers.append(handle.engine.generate_sync("Hello", GREEDY).output_token_ids)
        wait_until(lambda: handle.get_stats()["memory"]["weights"] == 0)
        wait_until(lambda: mx.get_active_memory() < before + weights / 2)
    assert answers[0] == answers[1]
    assert [progress.stage for progress in heard].count("ready") == 2
    handle.close()


# -- warming up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "nemotron_h"])
async def test_warming_up_changes_no_answer_and_no_statistics(family: str) -> None:
    answers = []
    for warm in (False, True):
        async with AsyncEngineCore(*tiny(family)) as engine:
            if warm:
                await engine.warm_up()
                stats = engine.get_stats()
                assert stats["total_completion_tokens"] == stats["num_requests_processed"] == 0
                assert stats["memory"]["kv"] == 0
                assert stats["prefix_cache"]["entry_count"] == 0
            hot = SamplingParams(max_tokens=8, temperature=1, seed=1)
            outputs = await asyncio.gather(engine.generate("Hello", GREEDY), engine.generate("Hello", hot))
            answers.append([output.output_token_ids for output in outputs])
            engine.close()
    assert answers[0] == answers[1]


async def test_warming_up_beside_requests_disturbs_nobody() -> None:
    async with AsyncEngineCore(*tiny()) as engine:
        long = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        alone = await engine.generate("Hello", long)
        running = asyncio.create_task(engine.generate("Hello", long))
        await engine.warm_up()
        assert (await running).output_token_ids == alone.output_token_ids
    engine.close()


async def test_warming_up_needs_a_started_engine(make: Make) -> None:
    with pytest.raises(EngineNotStarted):
        await make().warm_up()


# -- adapters -------------------------------------------------------------------------------------------


def test_an_adapter_changes_the_answers_as_it_does_in_mlx_lm(tmp_path: Path) -> None:
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    settings = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0},
    }
    model, _ = mlx_lm.load(str(tiny_folder()))
    model.freeze()
    linear_to_lora_layers(model, settings["num_layers"], settings["lora_parameters"])
    mx.random.seed(0)
    trained = {name: mx.random.normal(w.shape) for name, w in tree_flatten(model.trainable_parameters())}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), trained)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))

    adapted, tokenizer = mlx_lm.load(str(tiny_folder()), adapter_path=str(tmp_path))
    prompt = "Hello to the engine"
    expected = [r.token for r in mlx_lm.stream_generate(adapted, tokenizer, prompt, max_tokens=8)]
    answers = []
    for adapter in (None, tmp_path):
        handle = AsyncEngineCore.from_pretrained(tiny_folder(), adapter_path=adapter)
        handle.start()
        answers.append(handle.engine.generate_sync(prompt, GREEDY).output_token_ids)
        handle.close()
    assert answers[1] == expected != answers[0]


# -- several engines ------------------------------------------------------------------------------------


def test_several_engines_answer_at_once_as_each_does_alone() -> None:
    families = ["llama", "qwen3_5", "gemma3"]
    handles = [AsyncEngineCore.from_pretrained(tiny_folder(family)) for family in [*families, "llama"]]
    for handle in handles:
        handle.start()
    prompts = [f"prompt {n} of some" for n in range(4)]
    alone = [[o.output_token_ids for o in h.generate_batch_sync(prompts, GREEDY)] for h in handles]
    together: dict[int, Any] = {}

    def ask(place: int) -> None:
        outputs = [handles[place].generate_batch_sync(prompts, GREEDY) for _ in range(3)]
        together[place] = [[o.output_token_ids for o in run] for run in outputs]

    threads = [threading.Thread(target=ask, args=[place]) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == {place: [alone[place]] * 3 for place in range(4)}
    assert alone[0] == alone[3]
    handles[0].close()  # the others go on
    assert [o.output_token_ids for o in handles[3].generate_batch_sync(prompts, GREEDY)] == alone[3]
    for handle in handles:
        handle.close()
