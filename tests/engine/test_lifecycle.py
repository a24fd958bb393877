"""Start, stop, restart, close; who owns a model; what a failed load tells; several loops and threads at once."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from models import tiny, tiny_folder
from scripts import for_ever, says, until, wait_until

from mlx_nb import (
    AsyncEngineCore,
    EngineCore,
    EngineStopped,
    LoadProgress,
    ModelLoadError,
    ModelOwnershipError,
    SamplingParams,
    UnknownModelError,
)
from mlx_nb.backends.fake import fake_backend

LONG = SamplingParams(max_tokens=4000)
SHORT = SamplingParams(max_tokens=4, temperature=0)
Make = Any


# -- start and stop -------------------------------------------------------------------------------------


async def test_start_is_idempotent_and_stop_can_be_repeated(make: Make) -> None:
    engine = make(says("yes"))
    assert (engine.state, engine.is_running()) == ("new", False)
    await engine.stop()
    await engine.start()
    thread_count = threading.active_count()
    await engine.start()
    engine.launch()
    assert threading.active_count() == thread_count
    assert (engine.state, engine.is_running()) == ("running", True)
    await engine.stop()
    await engine.stop()
    assert (engine.state, engine.is_running()) == ("stopped", False)


async def test_stop_ends_the_engine_thread_and_start_works_again(make: Make) -> None:
    engine = make(says("yes"))
    for _ in range(3):
        await engine.start()
        assert (await engine.generate("q")).output_text == "yes"
        await engine.stop()
        assert not any(thread.name == "mlx-engine" for thread in threading.enumerate())
        with pytest.raises(EngineStopped, match="start"):
            await engine.generate("q")


async def test_start_right_after_a_stop_that_nobody_awaited(make: Make) -> None:
    engine = make(for_ever, step_s=0.02)
    await engine.start()
    pending = asyncio.create_task(engine.generate("q", LONG))
    await until(lambda: engine.get_stats()["active_requests"] == 1)
    engine.stop_soon()
    await engine.start()
    with pytest.raises(EngineStopped):
        await pending
    assert (await engine.generate("q", SHORT)).output_text == "xxxx"


async def test_the_handle_starts_without_being_awaited_and_requests_wait_for_it(make: Make) -> None:
    handle = AsyncEngineCore.over(make(says("yes"), load_s=0.1))
    assert handle.start() is None
    assert handle.is_running()
    assert (await handle.generate("q")).output_text == "yes"
    await handle.stop()
    assert not handle.is_running()


async def test_the_handle_as_a_context(make: Make) -> None:
    async with AsyncEngineCore.over(make(says("yes"))) as handle:
        request_id = await handle.add_request("q")
        assert [o async for o in handle.stream_outputs(request_id)][-1].output_text == "yes"
        assert handle.get_stats()["running"]
        assert await handle.abort_request(request_id) is False
    assert handle.engine.state == "stopped"


def test_the_handle_starts_without_any_running_loop(make: Make) -> None:
    handle = AsyncEngineCore.over(make(says("yes")))
    handle.start()
    assert [o.output_text for o in handle.generate_batch_sync(["a", "b"])] == ["yes", "yes"]
    handle.close()


async def test_stop_while_loading_ends_those_who_wait(make: Make) -> None:
    engine = make(load_s=0.2)
    engine.launch()
    waiting = [asyncio.create_task(engine.generate("q")) for _ in range(3)]
    await asyncio.sleep(0.02)
    await engine.stop()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert [type(result) for result in results] == [EngineStopped] * 3


async def test_a_closed_engine_takes_nothing_and_says_so(make: Make) -> None:
    engine = make()
    await engine.start()
    engine.close()
    engine.close()
    assert engine.state == "closed"
    with pytest.raises(EngineStopped):
        await engine.generate("q")
    with pytest.raises(EngineStopped, match="new one"):
        await engine.start()


async def test_close_ends_pending_consumers(make: Make) -> None:
    engine = make(for_ever, step_s=0.001)
    await engine.start()
    pending = asyncio.create_task(engine.generate("q", LONG))
    await until(lambda: engine.get_stats()["num_running"] == 1)
    engine.close()
    with pytest.raises(EngineStopped):
        await pending


def test_a_deleted_engine_ends_its_thread() -> None:
    engine = EngineCore(None, None, backend=fake_backend())
    engine.launch()
    engine.wait_ready(10)
    del engine
    gc.collect()
    wait_until(lambda: not any(thread.name == "mlx-engine" for thread in threading.enumerate()))


def test_waiting_for_a_slow_load_can_time_out(make: Make) -> None:
    engine = make(load_s=0.3)
    engine.launch()
    with pytest.raises(TimeoutError):
        engine.wait_ready(0.01)
    engine.wait_ready(10)


# -- a load that fails ----------------------------------------------------------------------------------


def failing(*_: Any) -> Any:
    time.sleep(0.05)
    raise ModelLoadError("there is no such model: choose another")


async def test_a_failed_load_reaches_every_waiter_and_leaves_no_thread(make: Make) -> None:
    engine = make(backend=failing)
    engine.launch()
    waiting = [asyncio.create_task(engine.generate("q")) for _ in range(3)]
    waiting.append(asyncio.create_task(engine.start()))
    from_thread: list[BaseException] = []

    def wait() -> None:
        try:
            engine.wait_ready(10)
        except ModelLoadError as error:
            from_thread.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    thread.join(10)
    assert [type(result) for result in [*results, *from_thread]] == [ModelLoadError] * 5
    assert engine.state == "failed"
    assert "no such model" in str(engine.failure)
    wait_until(lambda: not any(t.name == "mlx-engine" for t in threading.enumerate()))
    with pytest.raises(ModelLoadError):
        await engine.generate("q")


async def test_a_load_that_failed_once_can_be_tried_again(make: Make) -> None:
    tries = []

    def second_time_lucky(config: Any, on_progress: Any) -> Any:
        tries.append(config)
        if len(tries) == 1:
            raise ModelLoadError("not yet")
        return fake_backend(says("yes"))(config, on_progress)

    engine = make(backend=second_time_lucky)
    with pytest.raises(ModelLoadError):
        await engine.start()
    await engine.start()
    assert (await engine.generate("q")).output_text == "yes"


def test_an_unknown_model_is_refused_at_once() -> None:
    with pytest.raises(UnknownModelError):
        AsyncEngineCore.from_pretrained("no such model")


async def test_loading_reports_its_progress() -> None:
    heard: list[LoadProgress] = []
    handle = AsyncEngineCore.from_pretrained(tiny_folder(), on_progress=heard.append)
    async with handle:
        assert (await handle.generate("Hello", SHORT)).completion_tokens == 4
        assert handle.engine.info.precision == "float32"
    assert [progress.stage for progress in heard][-1] == "ready"
    handle.close()


# -- who owns a model -----------------------------------------------------------------------------------


def test_a_second_engine_on_one_model_can_be_refused() -> None:
    model, tokenizer = tiny()
    first = EngineCore(model, tokenizer, engine_id="first")
    with pytest.raises(ModelOwnershipError, match="first"):
        EngineCore(model, tokenizer, force_model_ownership=False)
    first.close()
    EngineCore(model, tokenizer, force_model_ownership=False).close()


async def test_a_second_engine_takes_over_cleanly() -> None:
    model, tokenizer = tiny()
    first, second = EngineCore(model, tokenizer), None
    try:
        await first.start()
        pending = asyncio.create_task(
            first.generate("Hello", SamplingParams(max_tokens=1900, ignore_eos=True))
        )
        await until(lambda: first.get_stats()["num_running"] == 1)
        second = EngineCore(model, tokenizer)
        with pytest.raises(ModelOwnershipError):
            await asyncio.wait_for(pending, 10)
        await second.start()
        assert first.state == "stopped"
        assert (await second.generate("Hello", SHORT)).completion_tokens == 4
    finally:
        first.close()
        if second:
            second.close()


@pytest.mark.parametrize("started", [True, False])
async def test_an_engine_that_lost_its_model_cant_start_while_another_has_it(started: bool) -> None:
    model, tokenizer = tiny()
    first = EngineCore(model, tokenizer, engine_id="first")
    if started:
        await first.start()
    second = EngineCore(model, tokenizer, engine_id="second")
    try:
        with pytest.raises(ModelOwnershipError, match="second"):
            await first.start()
        await second.start()
        second.close()
        await first.start()
        assert (await first.generate("Hello", SHORT)).completion_tokens == 4
    finally:
        first.close()
        second.close()


def test_engines_of_different_models_run_side_by_side() -> None:
    engines = [EngineCore(*tiny(family)) for family in ("llama", "qwen3")]
    for engine in engines:
        engine.launch()
    outputs = [engine.generate_sync("Hello", SHORT) for engine in engines]
    for engine in engines:
        engine.close()
    assert outputs[0].output_token_ids != outputs[1].output_token_ids


# -- what is left behind --------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "stop and delete", "delete", "fail"])
def test_the_model_can_be_collected_afterwards(end: str) -> None:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(tiny_folder("qwen3_5")))
    reference = weakref.ref(model)
    engine = EngineCore(model, tokenizer)
    del model
    engine.launch()
    engine.generate_batch_sync(["Hello", "a longer prompt"], SamplingParams(max_tokens=5, logprobs=2))
    held: list[BaseException] = []
    if end == "fail":

        def explode(_: Any, logits: Any) -> Any:
            raise ZeroDivisionError

        try:
            engine.generate_sync("Hello", SamplingParams(logits_processors=[explode]))
        except ZeroDivisionError as error:
            held.append(error)
        engine.close()
    elif end == "close":
        engine.close()
    elif end == "stop and delete":
        engine.stop_now()
        del engine
    else:
        del engine
    gc.collect()
    wait_until(lambda: gc.collect() is not None and reference() is None)


LEAVING = """
import asyncio, sys
from mlx_nb import AsyncEngineCore, SamplingParams
engine = AsyncEngineCore.from_pretrained(sys.argv[1])
params = SamplingParams(max_tokens=1500, temperature=0)

async def main():
    engine.start()
    print((await engine.generate("Hello", params.but(max_tokens=3))).completion_tokens)
    if sys.argv[2] == "closed":
        engine.close()
    elif sys.argv[2] == "stopped":
        await engine.stop()
    elif sys.argv[2] in ("busy", "dropped"):
        for _ in range(3):
            await engine.add_request("Hello", params)
        if sys.argv[2] == "dropped":  # its thread ends while the interpreter does
            del globals()["engine"]
    elif sys.argv[2] == "failed":
        from mlx_nb import EngineConfig, SchedulerConfig
        config = EngineConfig(scheduler_config=SchedulerConfig(max_kv_size=64))
        second = AsyncEngineCore.from_pretrained(sys.argv[1], config)
        try:
            await second.engine.start()
        except Exception as error:
            print(error)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["closed", "busy", "dropped", "failed"])
def test_the_process_exits_with_status_0(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, str(tiny_folder()), way],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "3"), done.stderr


# -- several loops and threads at once ------------------------------------------------------------------


def test_loops_and_threads_use_one_engine_at_once(make: Make) -> None:
    engine = make(step_s=0.001)
    handle = AsyncEngineCore.over(engine)
    handle.start()
    results: dict[str, list[str]] = {}

    async def on_loop(name: str) -> None:
        async def one(n: int) -> str:
            request_id = await handle.add_request(f"{name}{n}", SamplingParams(max_tokens=12))
            return "".join([o.new_text async for o in handle.stream_outputs(request_id)])

        results[name] = await asyncio.gather(*(one(n) for n in range(4)))

    def in_thread(name: str) -> None:
        params = SamplingParams(max_tokens=12)
        outputs = handle.generate_batch_sync([f"{name}{n}" for n in range(4)], params)
        results[name] = [output.output_text for output in outputs]

    threads = [threading.Thread(target=asyncio.run, args=[on_loop(name)]) for name in ("aa", "bb", "cc")]
    threads += [threading.Thread(target=in_thread, args=[name]) for name in ("dd", "ee")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {
        name: [(f"{name}{n}" * 4)[:12] for n in range(4)] for name in ("aa", "bb", "cc", "dd", "ee")
    }


def test_a_consumer_whose_loop_was_closed_harms_nobody(make: Make) -> None:
    engine = make(for_ever, step_s=0.001)
    engine.launch()

    async def begin() -> Any:
        stream = engine.stream_outputs(await engine.add_request("q", LONG))
        await anext(stream)
        return stream

    stream = asyncio.run(begin())
    time.sleep(0.02)
    assert engine.generate_sync("q", SHORT).output_text == "xxxx"
    del stream
    gc.collect()
    wait_until(lambda: engine.get_stats()["active_requests"] == 0)


async def test_generation_goes_on_while_the_loop_is_blocked(make: Make) -> None:
    engine = make(for_ever, step_s=0.001)
    await engine.start()
    request_id = await engine.add_request("q", LONG)
    before = engine.get_stats()["total_completion_tokens"]
    time.sleep(0.2)  # noqa: ASYNC251  a cell that sleeps
    assert engine.get_stats()["total_completion_tokens"] > before + 10
    await engine.abort_request(request_id)


async def test_no_call_on_the_loop_blocks_it_for_long(make: Make) -> None:
    engine = make(for_ever, step_s=0.5, load_s=1.0)
    longest = 0.0
    over = False

    async def watch() -> None:
        nonlocal longest
        while not over:
            began = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)

    watcher = asyncio.create_task(watch())
    await engine.start()
    request_id = await engine.add_request("q", LONG)
    answer = asyncio.create_task(engine.generate("q", LONG))
    async for output in engine.stream_outputs(request_id):
        if output.completion_tokens:
            break
    await engine.abort_request(request_id)
    engine.get_stats()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await engine.stop()
    over = True
    await watcher
    assert longest < 0.45  # a step takes longer, and so does loading


def test_an_idle_engine_uses_no_cpu(make: Make) -> None:
    engine = make(says("yes"))
    engine.launch()
    engine.generate_sync("q")
    time.sleep(0.05)
    steps, began = engine.get_stats()["steps_executed"], time.process_time()
    time.sleep(0.3)
    assert engine.get_stats()["steps_executed"] == steps
    assert time.process_time() - began < 0.1
