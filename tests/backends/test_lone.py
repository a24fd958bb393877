"""A row alone in decode goes on over plain caches; it says the same before, in and after company."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from models import tiny
from PIL import Image
from vlm_models import chat, tiny_vlm_folder

from mlx_nb import EngineConfig, SamplingParams, SchedulerConfig
from mlx_nb.backends import loader
from mlx_nb.backends.base import Fault, Prefilled, Token
from mlx_nb.backends.batch import BatchBackend
from mlx_nb.prompts.media import load_image
from mlx_nb.request import Media, Request

FAMILIES = ["llama", "qwen3_5", "gemma3", "gpt_oss", "falcon_h1", "mamba2", "nemotron_h", "deepseek_v3"]
PROMPT = list(range(40, 70))  # longer than the sliding windows of the tiny models
OTHER = [250, 11, 97, 130, 61]
GREEDY = SamplingParams(temperature=0)
LENGTH = 48


class Watched:
    """A model that notes for each call how many rows it was for, and over which kind of caches."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls: list[tuple[int, int, str]] = []
        self.broken: Callable[[tuple[int, ...]], bool] | None = None

    def __call__(self, tokens: mx.array, cache: list[Any], **more: Any) -> mx.array:
        rows, length = tokens.shape
        batched = any(hasattr(part, "left_padding") for part in _parts(cache))
        self.calls.append((rows, length, "batch" if batched else "plain"))
        if self.broken is not None and self.broken(tokens.shape):
            raise ZeroDivisionError("the model's step")
        logits: mx.array = self._model(tokens, cache=cache, **more)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def decoding(self) -> list[tuple[int, str]]:
        """Rows and caches of the calls for one token a row."""
        return [(rows, kind) for rows, length, kind in self.calls if length == 1]


def _parts(cache: list[Any]) -> list[Any]:
    parts = [part for entry in cache for part in getattr(entry, "caches", [entry])]
    # A recurrent state is of one class in a batch and out of it.
    return [part for part in parts if type(part).__name__ != "ArraysCache"]


class Rows:
    """A backend stepped by hand."""

    def __init__(self, backend: BatchBackend) -> None:
        self.backend = backend
        self.said: dict[str, list[Token]] = {}
        self.faults: dict[str, BaseException] = {}
        self.prefilled: dict[str, Prefilled] = {}

    def ask(
        self, name: str, prompt: Sequence[int] = PROMPT, params: SamplingParams = GREEDY, **options: Any
    ) -> None:
        self.said[name] = []
        made = options.pop("made", ())
        self.backend.insert(Request(name, list(prompt), params, options.pop("seed", 0), 0.0, **options), made)

    def step(self) -> list[Any]:
        events = self.backend.next()
        for event in events:
            match event:
                case Token():
                    self.said[event.request_id].append(event)
                case Fault():
                    self.faults[event.request_id] = event.error
                case Prefilled():
                    self.prefilled[event.request_id] = event
        return events

    def until(self, name: str, count: int) -> list[int]:
        """Step until so many tokens were said."""
        while len(self.said[name]) < count:
            assert name not in self.faults, self.faults[name]
            self.step()
        return self.ids(name)

    def end(self, name: str, *, keep: bool = False) -> None:
        self.backend.remove([name], keep=keep)

    def ids(self, name: str) -> list[int]:
        return [token.token_id for token in self.said[name]]


@pytest.fixture
def rows() -> Any:
    backends: list[BatchBackend] = []

    def start(family: str = "llama", **scheduler: Any) -> tuple[Rows, Watched]:
        model, tokenizer = tiny(family)
        loader.evaluate(model)
        watched = Watched(model)
        config = EngineConfig(scheduler_config=SchedulerConfig(**scheduler))
        backends.append(BatchBackend(watched, tokenizer, config))
        watched.calls.clear()
        return Rows(backends[-1]), watched

    yield start
    for backend in backends:
        backend.close()


def reference(family: str, prompt: Sequence[int], length: int = LENGTH) -> list[int]:
    """What mlx-lm says of it alone."""
    model, _ = tiny(family)
    return [token for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=length)]


# -- where it decodes -----------------------------------------------------------------------------------


def test_a_row_alone_decodes_over_plain_caches_and_in_company_in_the_batch(rows: Any) -> None:
    driver, model = rows()
    driver.ask("a")
    driver.until("a", 2)
    model.calls.clear()
    driver.until("a", 9)
    assert model.decoding == [(1, "plain")] * 7
    driver.ask("b", OTHER)
    driver.until("b", 2)
    model.calls.clear()
    driver.until("b", 9)
    assert model.decoding == [(2, "batch")] * 7
    driver.end("b")
    model.calls.clear()
    driver.until("a", len(driver.said["a"]) + 6)
    assert model.decoding == [(1, "plain")] * 6


def test_the_next_token_is_begun_before_the_last_is_read(rows: Any) -> None:
    driver, model = rows()
    driver.ask("a")
    driver.until("a", 5)
    # Prompt but its last token, that one, and the five tokens that were read.
    assert [length for _, length, _ in model.calls] == [len(PROMPT) - 1, 1, *[1] * 5]


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="a GPU computes beside Python")
def test_the_first_token_is_read_before_the_next_is_begun(rows: Any) -> None:
    driver, model = rows()
    driver.ask("a")
    driver.until("a", 1)
    assert [length for _, length, _ in model.calls] == [len(PROMPT) - 1, 1]
    driver.ask("b", OTHER)
    driver.until("b", 6)
    assert driver.ids("a")[:LENGTH] == reference("llama", PROMPT, len(driver.said["a"]))[:LENGTH]


def test_each_step_brings_its_token_while_a_long_prompt_is_prefilled_in_chunks(rows: Any) -> None:
    driver, model = rows(prefill_step_size=64, enable_prefix_cache=False)
    driver.ask("a")
    driver.until("a", 3)
    long = [20 + n % 200 for n in range(1500)]
    driver.ask("b", long)
    steps = 0
    model.calls.clear()
    while not driver.said["b"]:
        before = len(driver.said["a"])
        driver.step()
        steps += 1
        assert len(driver.said["a"]) == before + 1
        assert sum(length for _, length, _ in model.calls if length > 1) <= 64
        assert driver.said["b"] or (1, 1, "plain") in model.calls
        model.calls.clear()
    assert steps >= 1500 // 64
    assert driver.until("a", LENGTH) == reference("llama", PROMPT)
    assert driver.ids("b")[:6] == reference("llama", long, 6)


# -- the same ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("joins", [1, 5, 20, 37])
def test_company_comes_and_leaves_and_nothing_is_said_differently(joins: int, family: str, rows: Any) -> None:
    driver, model = rows(family)
    driver.ask("a")
    driver.until("a", joins)
    driver.ask("b", OTHER)
    driver.until("b", 4)
    driver.end("b")
    driver.until("a", len(driver.said["a"]) + 3)
    driver.ask("c", OTHER[::-1])
    driver.until("c", 5)
    assert (2, "batch") in model.decoding or family == "mamba2"
    assert driver.until("a", LENGTH + 8)[:LENGTH] == reference(family, PROMPT)
    driver.end("a")
    assert driver.until("c", 24)[:24] == reference(family, OTHER[::-1], 24)
    assert driver.ids("b")[:4] == reference(family, OTHER, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_several_come_at_once(family: str, rows: Any) -> None:
    driver, _ = rows(family)
    prompts = {f"p{n}": [60 + 7 * n, 33, 90 + n][: 1 + n % 3] * (1 + n) for n in range(5)}
    driver.ask("a")
    driver.until("a", 7)
    for name, prompt in prompts.items():
        driver.ask(name, prompt)
    driver.until("p4", 12)
    for name in list(prompts)[:4]:
        driver.end(name)
    driver.until("p4", 16)
    driver.end("a")
    driver.until("p4", 30)
    assert driver.ids("a") == reference(family, PROMPT, len(driver.ids("a")))
    for name, prompt in prompts.items():
        assert driver.ids(name) == reference(family, prompt, len(driver.ids(name)))


SHAPES = {
    "hot": {"temperature": 1.0, "top_p": 1.0},
    "bounded": {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "window": {"temperature": 0.8, "repetition_penalty": 1.3, "repetition_window": 6},
    "counts": {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "bias": {"temperature": 0.0, "logit_bias": {77: 1.5}},
    "grammar": {"temperature": 0.7, "regex": "([a-z]{3,7} ){40}"},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_s_sampling_goes_on_when_it_moves(shape: str, rows: Any) -> None:
    params = SamplingParams(**SHAPES[shape])
    noise = SamplingParams(temperature=1.0)
    alone, _ = rows()
    alone.ask("a", params=params, seed=5)
    alone.until("a", 40)
    accompanied, _ = rows()
    accompanied.ask("b", OTHER, noise)
    accompanied.ask("a", params=params, seed=5)
    accompanied.until("a", 40)
    moving, _ = rows()
    moving.ask("a", params=params, seed=5)
    for turn in (3, 11, 12, 26):
        moving.until("a", turn)
        moving.ask(f"b{turn}", OTHER, noise, seed=turn)
        moving.until(f"b{turn}", 2 + turn % 3)
        moving.end(f"b{turn}")
    moving.until("a", 40)
    told = [driver.said["a"][:40] for driver in (alone, accompanied, moving)]
    assert [t.token_id for t in told[0]] == [t.token_id for t in told[1]] == [t.token_id for t in told[2]]
    if params.logprobs is not None:
        for one, other in zip(told[0], told[2], strict=True):
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
            assert list(one.logprob.top) == list(other.logprob.top)


def test_a_processor_sees_the_same_tokens_wherever_its_row_is(rows: Any) -> None:
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    driver, _ = rows()
    driver.ask("a", params=GREEDY.but(logits_processors=[processor]))
    driver.until("a", 4)
    driver.ask("b", OTHER)
    driver.until("b", 4)
    driver.end("b")
    driver.until("a", 16)
    said = driver.ids("a")
    assert seen == [PROMPT + said[:n] for n in range(len(seen))]
    assert len(seen) == len(said) + 1


# -- what else a row can do -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3", "falcon_h1"])
def test_its_state_is_kept_for_the_next_prompt(family: str, rows: Any) -> None:
    driver, _ = rows(family)
    driver.ask("a")
    said = driver.until("a", 20)
    driver.end("a", keep=True)
    follow_up = [*PROMPT, *said, 33, 44]
    driver.ask("b", follow_up)
    assert driver.until("b", 10) == reference(family, follow_up, 10)
    assert driver.prefilled["b"].cached == len(PROMPT) + 20


def test_what_is_kept_of_it_takes_no_more_room_than_of_one_in_company(rows: Any) -> None:
    kept = []
    for company in (False, True):
        driver, _ = rows()
        driver.ask("a")
        if company:
            driver.ask("b", OTHER)
        driver.until("a", 9)
        driver.end("a", keep=True)
        kept.append(driver.backend.cache_stats().current_bytes)
    assert kept[0] == kept[1] > 0


def test_a_prompt_that_begins_like_it_goes_on_from_its_state_beside_it(rows: Any) -> None:
    driver, _ = rows()
    driver.ask("a")
    said = driver.until("a", 20)
    follow_up = [*PROMPT, *said, 33, 44]
    driver.ask("b", follow_up)
    driver.until("b", 10)
    assert driver.prefilled["b"].cached == len(PROMPT)
    assert driver.ids("b") == reference("llama", follow_up, 10)
    assert driver.until("a", LENGTH) == reference("llama", PROMPT)


def test_its_memory_is_counted_and_given_back(rows: Any) -> None:
    driver, _ = rows()
    driver.ask("a")
    driver.until("a", 5)
    assert driver.backend.memory().kv > 0
    driver.end("a")
    assert driver.backend.memory().kv == 0


@pytest.mark.parametrize(("most", "ways"), [(1, {(1, "plain")}), (8, {(1, "plain"), (4, "batch")})])
def test_warming_up_decodes_alone_and_in_company(most: int, ways: set[tuple[int, str]], rows: Any) -> None:
    driver, model = rows(completion_batch_size=most)
    driver.backend.warm_up()
    assert {*model.decoding} >= ways
    assert max(rows for rows, _ in model.decoding) == max(rows for rows, _ in ways)
    assert driver.backend.memory().kv == 0
    driver.ask("a")
    assert driver.until("a", 5) == reference("llama", PROMPT, 5)


def test_preempted_it_goes_on_where_it_was(rows: Any) -> None:
    driver, _ = rows()
    driver.ask("a", params=SamplingParams(temperature=1.0, repetition_penalty=1.2), seed=3)
    whole = driver.until("a", 30)
    driver.end("a")
    driver.ask("b", params=SamplingParams(temperature=1.0, repetition_penalty=1.2), seed=3, made=whole[:11])
    assert driver.until("b", 19) == whole[11:30]


def test_removed_at_any_moment_it_leaves_nothing(rows: Any) -> None:
    driver, _ = rows(enable_prefix_cache=False)
    for steps in range(6):
        driver.ask("a")
        for _ in range(steps):
            driver.step()
        driver.end("a")
        assert driver.backend.next() == []
        driver.ask("b", OTHER)
        assert driver.until("b", 5) == reference("llama", OTHER, 5)
        driver.end("b")


# -- faults ---------------------------------------------------------------------------------------------


def test_a_processor_that_raises_ends_its_row_alone(rows: Any) -> None:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == len(PROMPT) + 6:
            raise LookupError("my processor")
        return logits

    driver, _ = rows()
    driver.ask("a", params=GREEDY.but(logits_processors=[processor]))
    driver.until("a", 3)
    long = [20 + n % 200 for n in range(1000)]
    driver.ask("b", long)
    driver.until("b", 6)
    assert isinstance(driver.faults["a"], LookupError)
    assert driver.ids("a") == reference("llama", PROMPT, 6)
    assert driver.ids("b") == reference("llama", long, 6)


@pytest.mark.parametrize("at", range(4))
def test_a_processor_that_raises_has_no_say_in_what_is_told(at: int, rows: Any) -> None:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == len(PROMPT) + at:
            raise LookupError("my processor")
        return logits

    driver, _ = rows()
    driver.ask("a", params=GREEDY.but(logits_processors=[processor]))
    while not driver.faults:
        driver.step()
    said = driver.ids("a")
    assert said == reference("llama", PROMPT, 4)[: len(said)]
    assert len(said) <= at


def test_a_step_that_raises_spares_the_prompts_beside_it(rows: Any) -> None:
    driver, model = rows(prefill_step_size=64, enable_prefix_cache=False)
    driver.ask("a")
    driver.until("a", 3)
    driver.ask("b", [20 + n % 200 for n in range(1000)])
    driver.step()
    model.broken = lambda shape: shape == (1, 1)
    with pytest.raises(ZeroDivisionError):
        driver.step()
    model.broken = None
    assert driver.backend.reset() == ["b"]
    driver.ask("c", OTHER)
    assert driver.until("c", 5) == reference("llama", OTHER, 5)


def test_a_prompt_that_raises_spares_the_row_in_decode(rows: Any) -> None:
    driver, model = rows()
    driver.ask("a")
    said = driver.until("a", 3)
    driver.ask("b", OTHER)
    model.broken = lambda shape: shape[1] > 1
    with pytest.raises(ZeroDivisionError):
        driver.step()
    model.broken = None
    assert driver.backend.reset() == ["a"]
    driver.ask("a", made=said)
    assert driver.until("a", 9) == reference("llama", PROMPT, 12)[3:]


# -- pictures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "gemma3", "llava", "paligemma"])
def test_prompts_with_pictures_come_and_go(family: str, rows: Any) -> None:
    loaded = loader.load(tiny_vlm_folder(family))
    model = Watched(loaded.model)
    tokens: dict[str, list[list[int]]] = {"alone": [], "moving": []}
    for way, told in tokens.items():
        driver = Rows(BatchBackend(model, loaded.tokenizer, EngineConfig(), reader=loaded.reader))
        media = [_media(driver.backend, chat(family, "What is it?", images=1), n) for n in (1, 2)]
        driver.ask("a", media[0].tokens, media=media[0])
        if way == "alone":
            told += [driver.until("a", 30)[:30]]
            driver.end("a")
            driver.ask("b", media[1].tokens, media=media[1])
            told += [driver.until("b", 12)[:12]]
        else:
            driver.until("a", 9)
            driver.ask("b", media[1].tokens, media=media[1])
            driver.until("b", 5)
            driver.ask("c", driver.backend.codec.encode("ten jolly foxes"))
            driver.until("c", 3)
            driver.end("c")
            driver.until("b", 12)
            driver.end("b")
            model.calls.clear()
            told += [driver.until("a", len(driver.said["a"]) + 12)[:30], driver.ids("b")[:12]]
            assert {(rows, length) for rows, length, _ in model.calls} == {(1, 1)}
        driver.backend.close()
    assert tokens["moving"] == tokens["alone"]


def _media(backend: BatchBackend, text: str, number: int) -> Media:
    pixels = np.random.default_rng(number).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    return backend.codec.read_media(text, [load_image(Image.fromarray(pixels))], [])
