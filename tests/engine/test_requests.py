"""What is asked of an engine, and what it answers: the contract's promises to one request at a time."""

import asyncio
import gc
import threading
import time
from typing import Any

import pytest
from scripts import by_prompt, for_ever, raises, says, until, wait_until

from mlx_nb import AsyncEngineCore, EngineCore, EngineStopped, RequestError, SamplingParams

LONG = SamplingParams(max_tokens=4000)
Make = Any


# -- an answer ------------------------------------------------------------------------------------------


async def test_generate_gives_the_whole_answer(start: Make) -> None:
    output = await start(says("Paris.")).generate("The capital?")
    assert (output.output_text, output.new_text, output.finish_reason) == ("Paris.", "Paris.", "stop")
    assert output.finished
    assert output.error is None
    assert output.usage == {"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18}


async def test_the_end_token_is_in_neither_text_nor_ids_nor_counts(start: Make) -> None:
    engine = start(says("ab"))
    output = await engine.generate("q")
    assert output.output_token_ids == [97, 98]
    assert output.completion_tokens == 2
    assert "<eos>" not in output.output_text


async def test_ignore_eos_goes_on_to_max_tokens(start: Make) -> None:
    output = await start(says("ab")).generate("q", SamplingParams(max_tokens=5, ignore_eos=True))
    assert (output.completion_tokens, output.finish_reason) == (5, "length")


async def test_stop_token_ids_end_the_answer(start: Make) -> None:
    output = await start(says("abcdef")).generate("q", SamplingParams(stop_token_ids=[ord("d")]))
    assert (output.output_text, output.finish_reason) == ("abc", "stop")


async def test_a_prompt_of_token_ids_is_taken_as_it_is(start: Make) -> None:
    output = await start().generate([104, 105], SamplingParams(max_tokens=4))
    assert (output.output_text, output.prompt_tokens, output.finish_reason) == ("hihi", 2, "length")


async def test_max_tokens_zero_gives_an_empty_answer(start: Make) -> None:
    output = await start(for_ever).generate("q", SamplingParams(max_tokens=0))
    assert (output.output_text, output.output_token_ids, output.finish_reason) == ("", [], "length")
    assert output.finished


async def test_max_tokens_one_gives_one(start: Make) -> None:
    output = await start(for_ever).generate("q", SamplingParams(max_tokens=1))
    assert output.output_token_ids == [ord("x")]


async def test_the_answer_ends_where_the_context_does(start: Make) -> None:
    output = await start(for_ever, context_length=20).generate("x" * 12, LONG)
    assert (output.completion_tokens, output.finish_reason) == (8, "length")


# -- stop strings ---------------------------------------------------------------------------------------


async def test_a_stop_string_across_tokens_is_honoured_and_never_streamed(start: Make) -> None:
    engine = start(says("ABCDEFGHIJ"))
    request_id = await engine.add_request("q", SamplingParams(stop=["FG"]))
    outputs = [output async for output in engine.stream_outputs(request_id)]
    assert "".join(output.new_text for output in outputs) == "ABCDE" == outputs[-1].output_text
    assert outputs[-1].finish_reason == "stop"
    assert not any("F" in output.output_text for output in outputs)


async def test_what_only_looked_like_a_stop_string_is_let_through(start: Make) -> None:
    output = await start(says("abcabd")).generate("q", SamplingParams(stop="abx"))
    assert output.output_text == "abcabd"


async def test_text_held_back_at_max_tokens_is_let_through(start: Make) -> None:
    output = await start(says("abcdef")).generate("q", SamplingParams(max_tokens=3, stop="cd"))
    assert (output.output_text, output.finish_reason) == ("abc", "length")


async def test_a_stop_string_that_ends_at_max_tokens_counts_as_stop(start: Make) -> None:
    output = await start(says("abcdef")).generate("q", SamplingParams(max_tokens=3, stop="c"))
    assert (output.output_text, output.finish_reason) == ("ab", "stop")


# -- characters that span tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 12))
async def test_stream_and_final_text_agree_where_a_character_is_split(length: int, start: Make) -> None:
    engine = start(says("aé€😀"))
    request_id = await engine.add_request("q", SamplingParams(max_tokens=length))
    outputs = [output async for output in engine.stream_outputs(request_id)]
    whole = await engine.generate("q", SamplingParams(max_tokens=length))
    assert "".join(output.new_text for output in outputs) == outputs[-1].output_text == whole.output_text
    assert whole.output_text == "aé€😀".encode()[:length].decode(errors="replace")


# -- refusals -------------------------------------------------------------------------------------------

BAD = {
    "empty text": ("", {}, "empty"),
    "no tokens": ([], {}, "empty"),
    "over the context": ("x" * 4096, {}, "4,096"),
    "a token beyond the vocabulary": ([1, 9999], {}, "token id"),
    "a negative token": ([-1], {}, "token id"),
    "text in the ids": (["a"], {}, "token id"),
    "not a prompt": (5, {}, "text or a list"),
    "bytes": (b"abc", {}, "text or a list"),
    "parameters of another kind": ("q", {"sampling_params": {"max_tokens": 3}}, "SamplingParams"),
    "images": ("q", {"images": ["cat.png"]}, "takes no images"),
    "videos": ("q", {"videos": ["cat.mp4"]}, "takes no videos"),
    "a boundary beyond the prompt": ("abc", {"prefix_boundary": 9}, "prefix_boundary"),
    "a negative boundary": ("abc", {"prefix_boundary": -1}, "prefix_boundary"),
    "an id that is no text": ("abc", {"request_id": 5}, "request_id"),
    "a priority that is no number": ("abc", {"priority": "high"}, "priority"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_request_is_refused_and_leaves_nothing_behind(case: str, start: Make) -> None:
    prompt, options, message = BAD[case]
    engine = start(says("fine"))
    with pytest.raises(ValueError, match=message) as refused:
        await engine.generate(prompt, **options)
    assert "\n" not in str(refused.value)
    stats = engine.get_stats()
    assert (stats["active_requests"], stats["num_requests_processed"], stats["total_prompt_tokens"]) == (
        0,
        0,
        0,
    )
    assert (await engine.generate("q")).output_text == "fine"


async def test_a_tokenizer_that_raises_refuses_the_request_and_counts_nothing(start: Make) -> None:
    engine = start(says("fine"))
    with pytest.raises(ValueError, match="tokenizer"):
        await engine.generate("a lone surrogate \ud800")
    assert engine.get_stats()["active_requests"] == 0
    assert (await engine.generate("q")).output_text == "fine"


async def test_parameters_are_checked_without_a_prompt(start: Make) -> None:
    engine = start(context_length=64, kv_budget=256)

    engine.check(SamplingParams(max_tokens=8))
    with pytest.raises(RequestError, match="schema is not supported"):
        engine.check(SamplingParams(schema={}))

    assert engine.get_stats()["num_requests_processed"] == 0


async def test_a_parameter_the_backend_cant_honour_is_refused(start: Make) -> None:
    with pytest.raises(RequestError, match="regex"):
        await start().generate("q", SamplingParams(regex="[ab]+"))


async def test_a_duplicate_id_fails_alone(start: Make) -> None:
    engine = start(by_prompt({"first": says("one"), "second": says("two")}), step_s=0.005)
    await engine.add_request("first", request_id="same")
    with pytest.raises(ValueError, match="same"):
        await engine.add_request("second", request_id="same")
    outputs = [output async for output in engine.stream_outputs("same")]
    assert outputs[-1].output_text == "one"


async def test_an_id_whose_answer_nobody_read_yet_stays_taken(start: Make) -> None:
    engine = start(by_prompt({"first": says("one"), "second": says("two")}))
    await engine.add_request("first", request_id="same")
    await until(lambda: engine.get_stats()["num_requests_processed"] == 1)
    with pytest.raises(ValueError, match="same"):
        await engine.add_request("second", request_id="same")
    assert [o async for o in engine.stream_outputs("same")][-1].output_text == "one"


async def test_an_id_can_be_used_again_once_its_answer_was_read(start: Make) -> None:
    engine = start(says("yes"))
    for _ in range(3):
        assert (await engine.generate("q", request_id="same")).request_id == "same"


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
async def test_an_id_can_be_used_again_from_the_news_of_its_abort(phase: str, start: Make) -> None:
    first = "first" if phase != "prefill" else "first" * 600
    script = by_prompt({first: for_ever, "second": says("two"), "busy": for_ever})
    engine = start(script, step_s=0.002, config={"max_num_seqs": 2, "prefill_step_size": 8})
    busy = [engine.submit("busy", LONG) for _ in range(2 if phase == "waiting" else 0)]
    got: list[str] = []

    def again(_: Any) -> None:  # while the abort is under way
        engine.submit("second", request_id="same", on_done=lambda output: got.append(output.output_text))

    engine.submit(first, LONG, "same", on_done=again)
    await until(
        lambda: phase in [r["phase"] for r in engine.get_stats()["requests"] if r["request_id"] == "same"]
    )
    assert engine.abort("same")
    for request_id in busy:
        engine.abort(request_id)
    await until(lambda: got)
    assert got == ["two"]
    await until(lambda: engine.get_stats()["num_requests_processed"] == 2 + len(busy))
    steps = engine.get_stats()["steps_executed"]
    await asyncio.sleep(0.05)
    assert engine.get_stats()["steps_executed"] == steps  # nothing of the first runs on


async def test_an_unknown_id_can_be_neither_streamed_nor_aborted(start: Make) -> None:
    engine = start()
    assert await engine.abort_request("nobody") is False
    with pytest.raises(RequestError, match="nobody"):
        [output async for output in engine.stream_outputs("nobody")]


# -- faults ---------------------------------------------------------------------------------------------


async def test_a_fault_is_raised_to_its_own_consumer_only(start: Make) -> None:
    script = by_prompt({"bad": raises(ZeroDivisionError("boom"), after=3), "good": says("fine")})
    engine = start(script)
    bad, good = await asyncio.gather(engine.generate("bad"), engine.generate("good"), return_exceptions=True)
    assert isinstance(bad, ZeroDivisionError)
    assert good.output_text == "fine"
    assert (await engine.generate("good")).output_text == "fine"
    assert engine.get_stats()["active_requests"] == 0


async def test_a_stream_raises_the_fault_after_what_came_before(start: Make) -> None:
    engine = start(raises(ZeroDivisionError("boom"), after=3), step_s=0.002)
    request_id = await engine.add_request("q")
    seen = ""

    async def read() -> None:
        nonlocal seen
        async for output in engine.stream_outputs(request_id):
            seen += output.new_text

    with pytest.raises(ZeroDivisionError, match="boom"):
        await read()
    assert seen in ("", "x", "xx", "xxx")


async def test_an_error_that_is_its_own_cause_is_passed_on(start: Make) -> None:
    error = ValueError("round and round")
    error.__cause__ = error
    with pytest.raises(ValueError, match="round and round"):
        await start(raises(error)).generate("q")


# -- abort ----------------------------------------------------------------------------------------------


async def test_a_waiting_request_that_is_aborted_never_runs(start: Make) -> None:
    ran: list[str] = []

    def script(request: Any) -> Any:
        ran.append(request.request_id)
        return for_ever(request)

    engine = start(script, step_s=0.001, config={"max_num_seqs": 1})
    await engine.add_request("first", LONG, "first")
    await until(lambda: ran)
    await engine.add_request("second", LONG, "second")
    assert await engine.abort_request("second")
    outputs = [output async for output in engine.stream_outputs("second")]
    assert (outputs[-1].finish_reason, outputs[-1].output_text) == ("abort", "")
    assert await engine.abort_request("first")
    await until(lambda: engine.get_stats()["active_requests"] == 0)
    assert (await engine.generate("third", SamplingParams(max_tokens=1), "third")).finished
    assert ran == ["first", "third"]


async def test_abort_while_another_task_streams_ends_it_with_the_partial_text(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    request_id = await engine.add_request("q", LONG)

    async def read() -> list[Any]:
        return [output async for output in engine.stream_outputs(request_id)]

    reader = asyncio.create_task(read())
    await until(lambda: engine.get_stats()["total_completion_tokens"] > 5)
    assert await engine.abort_request(request_id)
    outputs = await asyncio.wait_for(reader, 10)
    last = outputs[-1]
    assert (last.finished, last.finish_reason) == (True, "abort")
    assert last.output_text
    assert "".join(output.new_text for output in outputs) == last.output_text
    assert await engine.abort_request(request_id) is False


async def test_abort_in_prefill_ends_the_request(start: Make) -> None:
    engine = start(for_ever, step_s=0.002, config={"prefill_step_size": 1})
    answer = asyncio.create_task(engine.generate("x" * 3000, LONG, "long"))
    await until(lambda: any(row["phase"] == "prefill" for row in engine.get_stats()["requests"]))
    assert await engine.abort_request("long")
    output = await asyncio.wait_for(answer, 10)
    assert (output.finish_reason, output.completion_tokens) == ("abort", 0)
    await until(lambda: engine.get_stats()["num_running"] == 0)


async def test_abort_of_a_finished_request_says_no(start: Make) -> None:
    engine = start(says("done"))
    request_id = await engine.add_request("q")
    await until(lambda: engine.get_stats()["num_requests_processed"] == 1)
    assert await engine.abort_request(request_id) is False
    assert [o async for o in engine.stream_outputs(request_id)][-1].finish_reason == "stop"


async def test_abort_all_ends_every_request(start: Make) -> None:
    engine = start(for_ever, step_s=0.001, config={"max_num_seqs": 2})
    answers = [asyncio.create_task(engine.generate("q", LONG)) for _ in range(5)]
    await until(lambda: engine.get_stats()["active_requests"] == 5)
    assert engine.abort_all() == 5
    assert {output.finish_reason for output in await asyncio.gather(*answers)} == {"abort"}


# -- leaving a stream -----------------------------------------------------------------------------------


async def live(engine: EngineCore) -> str:
    request_id = await engine.add_request("q", LONG)
    await until(lambda: engine.get_stats()["total_completion_tokens"] > 3)
    return request_id


async def is_gone(engine: EngineCore) -> None:
    await until(lambda: engine.get_stats()["active_requests"] == 0)
    assert engine.get_stats()["num_running"] == 0


async def test_breaking_out_of_a_stream_aborts_the_request(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    async for _ in engine.stream_outputs(await live(engine)):
        break
    gc.collect()
    await is_gone(engine)


async def test_closing_a_stream_aborts_the_request(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    stream = engine.stream_outputs(await live(engine))
    await anext(stream)
    await stream.aclose()
    await is_gone(engine)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_exception_in_the_loops_body_aborts_the_request(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)

    async def fail() -> None:
        async for _ in engine.stream_outputs(await live(engine)):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()
    gc.collect()
    await is_gone(engine)


async def test_cancelling_a_sleeping_consumer_propagates_and_aborts(start: Make) -> None:
    engine = start(for_ever, step_s=0.001, config={"max_num_seqs": 1})
    running = await live(engine)
    waiting = await engine.add_request("q", LONG)  # its consumer has nothing to wake up for

    async def read() -> None:
        async for _ in engine.stream_outputs(waiting):
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert reader.cancelled()
    assert [row["request_id"] for row in engine.get_stats()["requests"]] == [running]


async def test_cancelling_generate_propagates_and_aborts(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    answer = asyncio.create_task(engine.generate("q", LONG))
    await until(lambda: engine.get_stats()["total_completion_tokens"] > 3)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await is_gone(engine)


async def test_a_stream_that_nobody_begins_aborts_when_it_is_dropped(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    stream = engine.stream_outputs(await live(engine))
    del stream
    gc.collect()
    await is_gone(engine)


async def test_a_stream_timeout_raises_and_aborts(start: Make) -> None:
    engine = start(for_ever, step_s=0.001, config={"max_num_seqs": 1})
    await live(engine)
    waiting = await engine.add_request("q", LONG, "waiting")
    with pytest.raises(TimeoutError):
        async for _ in engine.stream_outputs(waiting, timeout=0.05):
            pass
    assert await engine.abort_request("waiting") is False


async def test_a_timeout_counts_silence_not_the_whole_answer(start: Make) -> None:
    engine = start(for_ever, step_s=0.01)
    request_id = await engine.add_request("q", SamplingParams(max_tokens=60))
    began = time.monotonic()
    outputs = [output async for output in engine.stream_outputs(request_id, timeout=0.5)]
    assert time.monotonic() - began > 0.5
    assert outputs[-1].completion_tokens == 60


# -- deltas ---------------------------------------------------------------------------------------------


async def test_two_consumers_of_one_request_both_get_all_of_it(start: Make) -> None:
    engine = start(says("abcdefgh" * 10), step_s=0.001)
    request_id = await engine.add_request("q")

    async def read() -> str:
        return "".join([output.new_text async for output in engine.stream_outputs(request_id)])

    assert await asyncio.gather(read(), read()) == ["abcdefgh" * 10] * 2


async def test_a_late_consumer_gets_all_of_it(start: Make) -> None:
    engine = start(says("all of it"))
    request_id = await engine.add_request("q")
    await until(lambda: engine.get_stats()["num_requests_processed"] == 1)
    outputs = [output async for output in engine.stream_outputs(request_id)]
    assert "".join(output.new_text for output in outputs) == "all of it"


async def test_stream_interval_bounds_how_often_deltas_come(start: Make) -> None:
    engine = start(says("x" * 50), step_s=0.002, config={"stream_interval": 10})
    request_id = await engine.add_request("q")
    sizes = [len(output.new_token_ids) async for output in engine.stream_outputs(request_id)]
    assert sum(sizes) == 50
    assert all(size >= 10 for size in sizes[:-1])


async def test_step_interval_gathers_steps_into_one_output(start: Make) -> None:
    engine = start(says("x" * 100), step_s=0.002, config={"step_interval": 0.1})
    request_id = await engine.add_request("q")
    sizes = [len(output.new_token_ids) async for output in engine.stream_outputs(request_id)]
    assert sum(sizes) == 100
    assert len(sizes) < 20


async def test_a_step_wakes_a_loop_once_however_many_answers_it_streams(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(says("x" * 40), step_s=0.005, config={"max_num_seqs": 8})
    loop = asyncio.get_running_loop()
    wake, woken = loop.call_soon_threadsafe, []
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: [woken.append(args), wake(*args)][-1])

    async def deltas(request_id: str) -> int:
        return len([output async for output in engine.stream_outputs(request_id)])

    ids = [await engine.add_request("q") for _ in range(8)]
    steps = engine.get_stats()["steps_executed"]
    counts = await asyncio.gather(*map(deltas, ids))
    steps = engine.get_stats()["steps_executed"] - steps
    assert sum(counts) > 4 * steps
    assert len(woken) < 2 * steps


async def test_consumers_that_read_at_different_times_read_the_same(start: Make) -> None:
    engine = start(says("naïve 😀 " * 20), step_s=0.001)
    request_id = await engine.add_request("q")
    early = engine.stream_outputs(request_id)
    seen = [await anext(early) for _ in range(3)]
    late = engine.stream_outputs(request_id)
    others = [output async for output in late]
    seen += [output async for output in early]
    assert "".join(output.new_text for output in seen) == "naïve 😀 " * 20
    assert "".join(output.new_text for output in others) == "naïve 😀 " * 20
    assert seen[-1].output_text == others[-1].output_text


# -- several prompts, synchronously ---------------------------------------------------------------------


def test_a_batch_comes_back_in_order(start: Make) -> None:
    prompts = [f"prompt {n}" for n in range(20)]
    outputs = start(config={"max_num_seqs": 4}).generate_batch_sync(prompts, SamplingParams(max_tokens=8))
    assert [output.output_text for output in outputs] == [prompt[:8] for prompt in prompts]


def test_a_batch_takes_parameters_for_all_or_for_each(start: Make) -> None:
    engine = start(for_ever)
    each = [SamplingParams(max_tokens=n) for n in (3, 1, 2)]
    assert [o.completion_tokens for o in engine.generate_batch_sync(["a", "b", "c"], each)] == [3, 1, 2]
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        engine.generate_batch_sync(["a", "b", "c"], each[:2])


def test_an_empty_batch_gives_nothing(start: Make) -> None:
    assert start().generate_batch_sync([]) == []


def test_one_text_is_no_batch(start: Make) -> None:
    with pytest.raises(ValueError, match="list"):
        start().generate_batch_sync("a text")


def test_a_bad_prompt_rejects_the_whole_batch_before_anything_is_queued(start: Make) -> None:
    engine = start(says("fine"))
    with pytest.raises(ValueError, match="empty"):
        engine.generate_batch_sync(["good", "", "good"])
    assert engine.get_stats()["num_requests_processed"] == 0
    assert engine.get_stats()["active_requests"] == 0


def test_with_errors_return_a_bad_prompt_and_a_fault_are_their_own_rows_error(start: Make) -> None:
    engine = start(by_prompt({"bad": raises(ZeroDivisionError("boom")), "good": says("fine")}))
    outputs = engine.generate_batch_sync(["good", "", "bad", "good"], errors="return")
    assert [output.output_text for output in outputs] == ["fine", "", "", "fine"]
    assert [type(output.error) for output in outputs] == [
        type(None),
        RequestError,
        ZeroDivisionError,
        type(None),
    ]
    assert [output.finish_reason for output in outputs] == ["stop", "error", "error", "stop"]


def test_with_errors_raise_a_fault_is_raised(start: Make) -> None:
    engine = start(by_prompt({"bad": raises(ZeroDivisionError("boom")), "good": says("fine")}))
    with pytest.raises(ZeroDivisionError, match="boom"):
        engine.generate_batch_sync(["good", "bad"])
    with pytest.raises(ValueError, match="errors"):
        engine.generate_batch_sync(["good"], errors="ignore")


async def test_a_batch_works_inside_a_running_loop_beside_its_streams(start: Make) -> None:
    engine = start(says("fine"), step_s=0.001)
    request_id = await engine.add_request("q")
    assert [o.output_text for o in engine.generate_batch_sync(["a", "b"])] == ["fine", "fine"]
    assert [o async for o in engine.stream_outputs(request_id)][-1].output_text == "fine"


def test_a_batch_that_is_interrupted_leaves_nothing_running(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    main = threading.main_thread()

    def interrupt() -> None:
        import signal

        wait_until(lambda: engine.get_stats()["num_running"] == 2)
        signal.pthread_kill(main.ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch_sync(["a", "b"], LONG)
    thread.join()
    wait_until(lambda: engine.get_stats()["active_requests"] == 0)


def test_a_sync_stream_gives_every_delta_and_can_be_left(start: Make) -> None:
    engine = start(says("abc"), step_s=0.001)
    assert "".join(o.new_text for o in engine.stream_sync(engine.submit("q"))) == "abc"
    endless = start(for_ever, step_s=0.001)
    for _ in endless.stream_sync(endless.submit("q", LONG)):
        break
    gc.collect()
    wait_until(lambda: endless.get_stats()["active_requests"] == 0)


def test_on_done_gets_the_final_output_and_may_fail_alone(start: Make) -> None:
    engine = start(says("fine"))
    got: list[str] = []
    engine.submit("q", on_done=lambda output: got.append(output.output_text))

    def fail(output: Any) -> None:
        got.append("failing")
        raise KeyError("a listener's own fault")

    engine.submit("q", on_done=fail)
    wait_until(lambda: len(got) == 2)
    assert engine.generate_sync("q").output_text == "fine"
    assert sorted(got) == ["failing", "fine"]


# -- before and after ------------------------------------------------------------------------------------


async def test_nothing_is_taken_before_start(make: Make) -> None:
    engine = make()
    with pytest.raises(RuntimeError, match="start"):
        await engine.generate("q")
    with pytest.raises(RuntimeError, match="start"):
        await engine.add_request("q")
    with pytest.raises(RuntimeError, match="start"):
        engine.generate_batch_sync(["q"])
    with pytest.raises(RuntimeError, match="start"):
        await AsyncEngineCore.over(engine).generate("q")


async def test_stop_ends_every_pending_consumer(start: Make) -> None:
    engine = start(for_ever, step_s=0.001, config={"max_num_seqs": 2})
    request_ids = [await engine.add_request("q", LONG) for _ in range(4)]

    async def read(request_id: str) -> None:
        async for _ in engine.stream_outputs(request_id):
            pass

    pending = [asyncio.create_task(read(request_id)) for request_id in request_ids]
    pending.append(asyncio.create_task(engine.generate("q", LONG)))
    await until(lambda: engine.get_stats()["active_requests"] == 5)
    await engine.stop()
    results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 10)
    assert [type(result) for result in results] == [EngineStopped] * 5
    assert engine.get_stats()["active_requests"] == 0
    with pytest.raises(EngineStopped):
        await engine.generate("q")
