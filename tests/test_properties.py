"""Whatever is done to an engine in whatever order, no request is lost, answered twice or left hanging."""

import random
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripts import wait_until

from mlx_nb import (
    EngineConfig,
    EngineCore,
    EngineStopped,
    RequestError,
    RequestOutput,
    SamplingParams,
    SchedulerConfig,
)
from mlx_nb.backends.fake import EOS, fake_backend

FAULT = "!"


def script(request: Any) -> Any:
    """The prompt again, once; a prompt that ends in ! fails half-way."""
    tokens = request.prompt_token_ids
    if tokens[-1] == ord(FAULT):
        yield from tokens[: len(tokens) // 2]
        raise ArithmeticError("the model's fault")
    yield from tokens
    yield EOS


class EngineMachine(RuleBasedStateMachine):
    """Requests are given to on_done, to a stream, or to nobody; each must end once, with a reason that fits."""

    @initialize(
        slots=st.integers(1, 4),
        budget=st.sampled_from([4, 64]),
        chunk=st.sampled_from([3, 64]),
        memory=st.sampled_from([None, 600]),
    )
    def make(self, slots: int, budget: int, chunk: int, memory: int | None) -> None:
        scheduler = SchedulerConfig(
            max_num_seqs=slots, max_num_batched_tokens=budget, prefill_step_size=chunk
        )
        self.engine = EngineCore(
            None,
            None,
            EngineConfig(scheduler_config=scheduler),
            backend=self._backend(fake_backend(script, kv_budget=memory)),
        )
        self.breaking = False
        self.broken = False
        self.number = 0
        self.ends: dict[str, list[RequestOutput]] = {}
        self.prompts: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.stopped: set[str] = set()
        self.streams: dict[str, Any] = {}
        self.seen: dict[str, str] = {}
        self.start()

    def _backend(self, make: Any) -> Any:
        """Whose next step fails when `breaking`; every second request had no part in it."""

        def made(config: Any, on_progress: Any) -> Any:
            backend = make(config, on_progress)
            insert, step, reset = backend.insert, backend.next, backend.reset
            inserted: dict[str, None] = {}

            def noted(request: Any, made: Any = ()) -> None:
                inserted[request.request_id] = None
                insert(request, made)

            def failing() -> Any:
                if self.breaking:
                    self.breaking = False
                    raise OverflowError("the step's fault")
                return step()

            def sparing() -> list[str]:
                reset()
                return list(inserted)[::2]

            backend.insert, backend.next, backend.reset = noted, failing, sparing
            return backend

        return made

    def running(self) -> bool:
        return self.engine.state == "running"

    @rule()
    def start(self) -> None:
        self.engine.launch()
        self.engine.wait_ready(10)

    @rule(
        length=st.integers(1, 40), fault=st.booleans(), consumer=st.sampled_from(["done", "stream", "both"])
    )
    @precondition(running)
    def add(self, length: int, fault: bool, consumer: str) -> None:
        name = str(self.number)
        self.number += 1
        prompt = (f"{name} says " * 10)[:length] + (FAULT if fault else ".")
        self.prompts[name] = prompt
        self.ends[name] = []
        on_done = None if consumer == "stream" else self.ends[name].append
        self.engine.submit(prompt, SamplingParams(max_tokens=100), name, on_done=on_done)
        if consumer != "done":
            try:
                self.streams[name] = self.engine.stream_sync(name, timeout=10)
                self.seen[name] = ""
            except RequestError:  # it had ended, and on_done was its consumer
                assert consumer == "both"

    # What is drawn must not depend on how far the engine's thread has got: hence numbers, not names.

    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        if not self.number:
            return
        name = str(pick % self.number)
        if self.engine.abort(name):
            assert name not in self.aborted
            self.aborted.add(name)

    @rule(pick=st.integers(0, 99))
    def read_on(self, pick: int) -> None:
        if name := self._some_stream(pick):
            self._read(name)

    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        if name := self._some_stream(pick):
            self.streams.pop(name).close()

    def _some_stream(self, pick: int) -> str | None:
        return sorted(self.streams)[pick % len(self.streams)] if self.streams else None

    @rule()
    def break_a_step(self) -> None:
        self.broken = self.breaking = True

    @rule(millis=st.integers(0, 3))
    def wait(self, millis: int) -> None:
        time.sleep(millis / 1000)

    @rule()
    @precondition(running)
    def stop(self) -> None:
        self.engine.stop_now(10)
        self.stopped |= set(self.ends)
        assert not self.engine.is_running()

    @rule(paused=st.booleans())
    @precondition(running)
    def pause(self, paused: bool) -> None:
        self.engine.pause() if paused else self.engine.resume()
        assert self.engine.paused is paused

    @invariant()
    def statistics_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        stats = self.engine.get_stats()
        assert (
            stats["active_requests"] == stats["num_waiting"] + stats["num_running"] == len(stats["requests"])
        )
        assert stats["num_running"] <= stats["max_running"]

    def _read(self, name: str) -> bool:
        """Take one output; False once there is none."""
        if self.engine.paused:  # it may never come
            self.engine.resume()
        try:
            output = next(self.streams[name])
        except StopIteration:
            del self.streams[name]
            return False
        except (ArithmeticError, EngineStopped, RequestError) as error:
            if isinstance(error, OverflowError):  # an ArithmeticError as well
                assert self.broken
            elif isinstance(error, ArithmeticError):
                assert self.prompts[name].endswith(FAULT)
            del self.streams[name]
            return False
        self.seen[name] += output.new_text
        assert output.output_text == self.seen[name]
        assert self.prompts[name].startswith(output.output_text)
        if output.finished and output.finish_reason == "stop":
            assert output.output_text == self.prompts[name]
        return True

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            if self.engine.is_running():
                self.engine.resume()
            for name in list(self.streams):
                while self._read(name):
                    pass
            end = time.monotonic() + 10
            while self.engine.get_stats()["active_requests"]:
                assert time.monotonic() < end, "a request hangs"
                time.sleep(0.001)
            self._check_ends()
        finally:
            self.engine.close()

    def _check_ends(self) -> None:
        for name, outputs in self.ends.items():
            assert len(outputs) <= 1, "answered twice"
            for output in outputs:
                assert output.finished
                if output.finish_reason == "stop":
                    assert output.output_text == self.prompts[name]
                    assert not self.prompts[name].endswith(FAULT)
                elif output.finish_reason == "error":
                    kind = ArithmeticError if name not in self.stopped else (ArithmeticError, EngineStopped)
                    assert isinstance(output.error, kind)
                    assert self.broken or not isinstance(output.error, OverflowError)
                else:
                    assert output.finish_reason == "abort"


EngineMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_of_threads_gets_every_answer(seed: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, prefill_step_size=8)
    config = EngineConfig(scheduler_config=scheduler)
    engine = EngineCore(None, None, config, backend=fake_backend(script, kv_budget=4000))
    engine.launch()
    engine.wait_ready(10)
    wrong: list[Any] = []

    def ask(worker: int) -> None:
        rng = random.Random(seed * 100 + worker)
        for n in range(25):
            fault = rng.random() < 0.2
            prompt = f"{worker}/{n} " * rng.randint(1, 9) + (FAULT if fault else ".")
            way = rng.random()
            try:
                if way < 0.3:
                    request_id = engine.submit(prompt)
                    time.sleep(rng.random() / 500)
                    engine.abort(request_id)
                    text = [o.output_text for o in engine.stream_sync(request_id, timeout=20)][-1]
                    good = prompt.startswith(text)
                else:
                    good = engine.generate_sync(prompt).output_text == prompt
            except ArithmeticError:
                good = fault
            if not good:
                wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=[worker]) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    wait_until(lambda: engine.get_stats()["num_requests_processed"] == 150)
    stats = engine.get_stats()
    assert (stats["active_requests"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
    engine.close()
