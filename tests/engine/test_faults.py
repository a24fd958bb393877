"""A fault ends the requests it concerns, with that exception, and no others; the engine serves the next."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import tiny
from scripts import by_prompt, for_ever, says, until, wait_until

from mlx_nb import CacheMismatchError, EngineConfig, EngineCore, RequestError, SamplingParams, SchedulerConfig
from mlx_nb.backends.batch import BatchBackend
from mlx_nb.backends.fake import FakeCodec, fake_backend
from mlx_nb.backends.samplers import RowSampler

LONG = SamplingParams(max_tokens=4000)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
POISON = 1
"""A special token, which no text in here has."""
Make = Any


class Poisoned:
    """A model that raises when a certain token is in a prompt, or at the next decode step when told to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.in_decode = False

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        decoding = inputs.shape[1] == 1
        if self.in_decode and decoding:
            self.in_decode = False
            raise ZeroDivisionError("in decode")
        if not decoding and POISON in inputs.flatten().tolist():
            raise ZeroDivisionError("in prefill")
        return self._model(inputs, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.fixture
def start_model() -> Iterator[Any]:
    """Start an engine around a tiny model; the model it steps, and the engine."""
    engines = []

    def started(family: str = "llama", backend: Any = BatchBackend, **scheduler: Any) -> Any:
        model = Poisoned(tiny(family)[0])
        config = EngineConfig(scheduler_config=SchedulerConfig(**scheduler))
        engine = EngineCore(
            None, None, config, backend=lambda config, _: backend(model, tiny(family)[1], config)
        )
        engines.append(engine)
        engine.launch()
        engine.wait_ready(30)
        return model, engine

    yield started
    for engine in engines:
        engine.close()


# -- the model's step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
async def test_a_prompt_that_fails_spares_the_rows_in_decode(family: str, start_model: Any) -> None:
    _, engine = start_model(family)
    prompts = ["one prompt", "another, longer prompt"]
    hot = SamplingParams(max_tokens=150, temperature=1, seed=4, ignore_eos=True)
    params = [hot.but(temperature=0), hot]
    alone = [(await engine.generate(*pair)).output_token_ids for pair in zip(prompts, params, strict=True)]
    engine.clear_prefix_cache()
    done = engine.get_stats()["total_completion_tokens"]
    answers = [asyncio.create_task(engine.generate(*pair)) for pair in zip(prompts, params, strict=True)]
    await until(lambda: engine.get_stats()["total_completion_tokens"] > done + 20)
    with pytest.raises(ZeroDivisionError, match="in prefill"):
        await engine.generate([5, 6, POISON, 7], GREEDY)
    assert [output.output_token_ids for output in await asyncio.gather(*answers)] == alone


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
async def test_a_decode_step_that_fails_spares_the_prompts_in_prefill_and_in_line(
    family: str, start_model: Any
) -> None:
    model, engine = start_model(family, prefill_step_size=16, max_num_seqs=2, enable_prefix_cache=False)
    prompt = [9, *[30, 40, 50] * 300]
    alone = (await engine.generate(prompt, GREEDY)).output_token_ids
    waits = (await engine.generate("waits in line", GREEDY)).output_token_ids
    decoding = asyncio.create_task(
        engine.generate("decodes", SamplingParams(max_tokens=1500, ignore_eos=True))
    )
    await until(lambda: any(row["phase"] == "decode" for row in engine.get_stats()["requests"]))
    answers = [asyncio.create_task(engine.generate(p, GREEDY)) for p in (prompt, "waits in line")]
    await until(lambda: any(row["phase"] == "prefill" for row in engine.get_stats()["requests"]))
    model.in_decode = True
    with pytest.raises(ZeroDivisionError, match="in decode"):
        await decoding
    assert [output.output_token_ids for output in await asyncio.gather(*answers)] == [alone, waits]


def test_a_fault_that_never_goes_away_ends_each_request_and_not_the_engine(start_model: Any) -> None:
    _, engine = start_model()
    for _ in range(3):
        outputs = engine.generate_batch_sync([[5, POISON, 6], [8, POISON, 9]], GREEDY, errors="return")
        assert [type(output.error) for output in outputs] == [ZeroDivisionError] * 2
    assert engine.state == "running"
    assert engine.generate_sync("next", GREEDY).error is None
    assert engine.get_stats()["active_requests"] == 0


# -- the sampler ----------------------------------------------------------------------------------------


def test_a_sampler_that_fails_ends_the_rows_of_its_step(
    start_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = start_model()
    draw, broken = RowSampler.__call__, threading.Event()

    def failing(*args: Any) -> Any:
        if broken.is_set():
            broken.clear()
            raise FloatingPointError("the draw")
        return draw(*args)

    monkeypatch.setattr(RowSampler, "__call__", failing)
    hot = SamplingParams(max_tokens=1500, temperature=1, ignore_eos=True)
    request_ids = [engine.submit("hot", hot) for _ in range(2)]
    wait_until(lambda: engine.get_stats()["total_completion_tokens"] > 10)
    broken.set()
    for request_id in request_ids:
        with pytest.raises(FloatingPointError, match="the draw"):
            list(engine.stream_sync(request_id, timeout=30))
    assert engine.generate_sync("next", hot.but(max_tokens=5)).completion_tokens == 5


# -- what the backend is told ---------------------------------------------------------------------------


class Stubborn(BatchBackend):
    """Refuses a certain prompt, and fails to drop rows when told to."""

    stuck = False

    def insert(self, request: Any, made: Any = ()) -> None:
        if POISON in request.prompt_token_ids:
            raise KeyError("insert")
        super().insert(request, made)

    def remove(self, request_ids: Any, *, keep: bool) -> None:
        if request_ids and Stubborn.stuck:
            Stubborn.stuck = False
            raise MemoryError("remove")
        super().remove(request_ids, keep=keep)


def test_a_request_that_cant_be_inserted_fails_alone(start_model: Any) -> None:
    _, engine = start_model(backend=Stubborn)
    alone = engine.generate_sync("good", GREEDY).output_token_ids
    outputs = engine.generate_batch_sync(["good", [5, POISON], "good"], GREEDY, errors="return")
    assert isinstance(outputs[1].error, KeyError)
    assert [outputs[0].output_token_ids, outputs[2].output_token_ids] == [alone, alone]
    assert engine.get_stats()["active_requests"] == 0


@pytest.mark.parametrize("way", ["end", "abort"])
def test_rows_that_cant_be_dropped_harm_nobody(
    way: str, start_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, engine = start_model(backend=Stubborn)
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    alone = engine.generate_sync("stays", long).output_token_ids
    done = engine.get_stats()["total_completion_tokens"]
    leaving = engine.submit("leaves", long.but(max_tokens=60 if way == "end" else 1500))
    staying = engine.submit("stays", long)
    wait_until(lambda: engine.get_stats()["total_completion_tokens"] > done + 20)
    Stubborn.stuck = True
    with caplog.at_level(logging.CRITICAL, "mlx_nb"):
        if way == "abort":
            assert engine.abort(leaving)
        last = list(engine.stream_sync(leaving, timeout=30))[-1]
        stayed = list(engine.stream_sync(staying, timeout=30))[-1]
    assert last.finish_reason == ("length" if way == "end" else "abort")
    assert not Stubborn.stuck
    assert stayed.output_token_ids == alone


# -- text -----------------------------------------------------------------------------------------------


class Faulty(FakeCodec):
    """Bytes, of which it can't read "!", nor write a lone surrogate."""

    def decode(self, token_ids: Any) -> str:
        if ord("!") in token_ids:
            raise UnicodeError("no exclamation marks")
        return super().decode(token_ids)


def faulty(*script: Any, **options: Any) -> Any:
    def backend(config: Any, on_progress: Any) -> Any:
        made: Any = fake_backend(*script, **options)(config, on_progress)
        made.codec = Faulty()
        return made

    return backend


async def test_a_detokenizer_that_fails_ends_its_own_request(make: Make) -> None:
    script = by_prompt({"bad": says("so far!so bad"), "good": says("so good")})
    engine = make(backend=faulty(script, step_s=0.001))
    await engine.start()
    good, bad = await asyncio.gather(engine.generate("good"), engine.generate("bad"), return_exceptions=True)
    assert isinstance(bad, UnicodeError)
    assert good.output_text == "so good"
    seen = ""

    async def read() -> None:
        nonlocal seen
        async for output in engine.stream_outputs(await engine.add_request("bad")):
            seen += output.new_text

    with pytest.raises(UnicodeError, match="exclamation"):
        await read()
    assert "so far".startswith(seen)
    assert (await engine.generate("good")).output_text == "so good"
    assert engine.get_stats()["active_requests"] == 0


async def test_a_prompt_that_only_its_preview_fails_for_is_answered(make: Make) -> None:
    engine = make(backend=faulty(says("fine")))
    await engine.start()
    assert (await engine.generate([ord("!"), ord("a")])).output_text == "fine"


async def test_a_tokenizer_that_fails_refuses_the_request_beside_others(make: Make) -> None:
    engine = make(for_ever, step_s=0.001)
    await engine.start()
    running = asyncio.create_task(engine.generate("q", SamplingParams(max_tokens=100)))
    await until(lambda: engine.get_stats()["num_running"] == 1)
    with pytest.raises(RequestError, match="tokenizer") as refused:
        await engine.generate("\ud800")
    assert isinstance(refused.value.__cause__, UnicodeError)
    assert (await running).output_text == "x" * 100
    assert engine.get_stats()["num_requests_processed"] == 1


# -- who listens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [KeyError("mine"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()]
)
def test_a_listener_that_fails_in_whatever_way_is_its_own_problem(
    error: BaseException, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(says("fine"), step_s=0.001)
    heard: list[str] = []

    def fail(_: Any) -> None:
        heard.append("failing")
        raise error

    with caplog.at_level(logging.CRITICAL, "mlx_nb"):
        engine.submit("q", on_done=fail)
        engine.submit("q", on_done=lambda output: heard.append(output.output_text))
        wait_until(lambda: len(heard) == 2)
        assert engine.generate_sync("q").output_text == "fine"
    assert engine.state == "running"
    assert sorted(heard) == ["failing", "fine"]


async def test_a_consumer_that_fails_leaves_the_others_of_its_request(start: Any) -> None:
    engine = start(for_ever, step_s=0.001)
    request_id = await engine.add_request("q", SamplingParams(max_tokens=50))
    second = engine.stream_outputs(request_id)

    async def fail() -> None:
        async for _ in engine.stream_outputs(request_id):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()
    # Leaving early aborts: what there was reaches the other as well, and it ends.
    outputs = [output async for output in second]
    assert outputs[-1].finish_reason in ("abort", "length")
    assert "".join(output.new_text for output in outputs) == outputs[-1].output_text


# -- saved prefixes -------------------------------------------------------------------------------------


def test_a_damaged_cache_file_costs_its_own_entry_and_no_request(
    start_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, engine = start_model()
    prompts = ["a first prompt to keep", "quite another one"]
    alone = [o.output_token_ids for o in engine.generate_batch_sync(prompts, GREEDY)]
    assert engine.save_cache_to_disk(tmp_path / "saved")
    damaged = min((tmp_path / "saved").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    engine.clear_prefix_cache()
    running = engine.submit(
        "running meanwhile", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    )
    with caplog.at_level(logging.WARNING, "mlx_nb"):
        assert engine.load_cache_from_disk(tmp_path / "saved") == 1
    assert "damaged" in caplog.text
    assert list(engine.stream_sync(running, timeout=30))[-1].completion_tokens == 60
    again = engine.generate_batch_sync(prompts, GREEDY)
    assert [o.output_token_ids for o in again] == alone
    assert sorted(o.cached_tokens > 0 for o in again) == [False, True]


def test_a_folder_that_cant_be_read_or_written_is_the_callers_fault_alone(
    start_model: Any, tmp_path: Path
) -> None:
    _, engine = start_model()
    engine.generate_sync("something to keep", GREEDY)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises((OSError, CacheMismatchError)):
        engine.save_cache_to_disk(tmp_path / "file" / "below")
    with pytest.raises((OSError, CacheMismatchError)):
        engine.load_cache_from_disk(tmp_path / "nothing")
    assert engine.generate_sync("next", GREEDY).error is None
