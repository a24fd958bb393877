"""Prompts that arrive together or while others run: what they have in common is prefilled once."""

import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from models import tiny
from scripts import wait_until

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig
from mlx_nb.backends.base import Fault, Prefilled, Token
from mlx_nb.backends.batch import BatchBackend
from mlx_nb.request import Request

FAMILIES = ["llama", "qwen3_5", "gemma3"]
"""Whose states can be cut back; of recurrent layers; of sliding windows."""
NEW = 6
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)


class Counting:
    """A model that counts its calls and their tokens, except those of single steps."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.prefilled = self.calls = 0
        self.fails = lambda: False

    def __call__(self, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if self.fails():
            raise RuntimeError("the model fails")
        if tokens.shape[1] > 1:
            self.prefilled += tokens.size
            self.calls += 1
        logits: mx.array = self._model(tokens, *args, **kwargs)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Batch:
    """A backend that is stepped by hand, and what came of its requests."""

    def __init__(self, family: str = "llama", *, step: int = 32, **scheduler: Any) -> None:
        model, tokenizer = tiny(family)
        self.model = Counting(model)
        config = EngineConfig(scheduler_config=SchedulerConfig(prefill_step_size=step, **scheduler))
        self.backend = BatchBackend(self.model, tokenizer, config)
        self.model.prefilled = self.model.calls = 0
        self.ids: dict[str, list[int]] = defaultdict(list)
        self.cached: dict[str, int] = {}
        self.done: dict[str, int] = defaultdict(int)
        self.faults: dict[str, BaseException] = {}
        self.first: list[str] = []

    def insert(self, prompts: dict[str, list[int]], params: SamplingParams = GREEDY) -> None:
        for name, tokens in prompts.items():
            self.backend.insert(Request(name, tokens, params, seed=0, arrival=0.0))

    def step(self) -> None:
        for event in self.backend.next():
            if isinstance(event, Prefilled):
                self.done[event.request_id], self.cached[event.request_id] = event.done, event.cached
            elif isinstance(event, Token):
                if not self.ids[event.request_id]:
                    self.first.append(event.request_id)
                self.ids[event.request_id].append(event.token_id)
            elif isinstance(event, Fault):
                self.faults[event.request_id] = event.error

    def until(self, name: str, done: int) -> None:
        """Step until so many tokens of a prompt are there."""
        while self.done[name] < done:
            self.step()

    def finish(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Step until all have their tokens, and remove each when it has."""
        left = set(names)
        for _ in range(500):
            self.step()
            whole = [name for name in left if len(self.ids[name]) >= NEW]
            self.backend.remove(whole, keep=False)
            left -= {*whole, *self.faults}
            if not left:
                break
        assert not left, f"still waiting: {left}"
        assert self.backend.memory().kv == 0
        return {name: self.ids[name][:NEW] for name in names}


def tokens_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 300) for _ in range(length)]


HEAD = tokens_of(200, 1)


def alike(count: int, tail: int = 10) -> dict[str, list[int]]:
    return {f"r{i}": HEAD + tokens_of(tail, 100 + i) for i in range(count)}


def alone(family: str, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """What comes of each prompt by itself."""
    ids = {}
    for name, tokens in prompts.items():
        batch = Batch(family, enable_prefix_cache=False)
        batch.insert({name: tokens})
        ids |= batch.finish([name])
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_what_prompts_share_is_prefilled_once(family: str) -> None:
    prompts = alike(5)
    batch = Batch(family)
    batch.insert(prompts)
    assert batch.finish([*prompts]) == alone(family, prompts)
    assert batch.cached == {"r0": 0, **{f"r{i}": len(HEAD) for i in range(1, 5)}}
    assert batch.model.prefilled <= len(HEAD) + 5 * 12
    assert batch.model.calls == 8  # seven of 32 tokens, and one for what all have behind it
    stats = batch.backend.cache_stats()
    assert stats is not None
    assert (stats.hits, stats.misses, stats.tokens_saved) == (4, 1, 4 * len(HEAD))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_newcomer_waits_for_a_prompt_that_is_half_way(family: str) -> None:
    prompts = alike(2)
    batch = Batch(family)
    batch.insert({"r0": prompts["r0"]})
    batch.until("r0", 60)
    batch.insert({"r1": prompts["r1"]})
    assert batch.finish([*prompts]) == alone(family, prompts)
    assert batch.cached["r1"] == len(HEAD)


def test_a_newcomer_goes_on_from_the_prompt_of_an_answer_in_the_making() -> None:
    prompts = alike(3)
    batch = Batch()
    batch.insert({"r0": prompts["r0"]}, GREEDY)
    batch.until("r0", 210)
    batch.step()
    for name in ("r1", "r2"):
        batch.insert({name: prompts[name]})
        batch.step()
    assert batch.finish([*prompts]) == alone("llama", prompts)
    assert batch.cached == {"r0": 0, "r1": 200, "r2": 200}


@pytest.mark.parametrize("family", FAMILIES)
def test_of_identical_prompts_all_but_the_last_token_is_shared(family: str) -> None:
    prompts = {f"r{i}": HEAD for i in range(4)}
    batch = Batch(family)
    batch.insert(prompts)
    assert batch.finish([*prompts]) == alone(family, prompts)
    assert [batch.cached[f"r{i}"] for i in range(4)] == [0, *[len(HEAD) - 1] * 3]
    assert batch.model.prefilled <= len(HEAD)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_of_prompts_each_sharing_more_with_the_one_before(family: str) -> None:
    more, most = tokens_of(60, 2), tokens_of(60, 3)
    prompts = {
        "a": HEAD + tokens_of(30, 4),
        "b": HEAD + more + tokens_of(30, 5),
        "c": HEAD + more + most + tokens_of(30, 6),
        "d": HEAD + more + most + tokens_of(5, 7),
    }
    batch = Batch(family)
    batch.insert(prompts)
    assert batch.finish([*prompts]) == alone(family, prompts)
    assert batch.cached == {"a": 0, "b": 200, "c": 260, "d": 320}


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_do_not_mix(family: str) -> None:
    other = tokens_of(150, 8)
    prompts = alike(3) | {f"s{i}": other + tokens_of(10, 200 + i) for i in range(3)}
    mixed = dict(sorted(prompts.items(), key=lambda item: item[0][1:]))
    batch = Batch(family)
    batch.insert(mixed)
    assert batch.finish([*mixed]) == alone(family, mixed)
    assert sorted(batch.cached.values()) == [0, 0, 150, 150, 200, 200]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("done", [0, 60, 199])
def test_when_the_first_is_removed_the_next_goes_on_from_where_it_was(family: str, done: int) -> None:
    prompts = alike(4)
    batch = Batch(family)
    batch.insert(prompts)
    batch.until("r0", done)
    reached = min(batch.done["r0"], 200)
    batch.backend.remove(["r0"], keep=False)
    rest = ["r1", "r2", "r3"]
    assert batch.finish(rest) == {k: v for k, v in alone(family, prompts).items() if k in rest}
    assert batch.cached["r1"] == reached
    assert (batch.cached["r2"], batch.cached["r3"]) == (200, 200)


def test_those_removed_while_they_wait_are_forgotten() -> None:
    prompts = alike(4)
    batch = Batch()
    batch.insert(prompts)
    batch.until("r0", 60)
    batch.backend.remove(["r1", "r3"], keep=False)
    assert batch.finish(["r0", "r2"]).keys() == {"r0", "r2"}
    assert batch.ids.keys() == {"r0", "r2"}
    batch.insert({"r1": prompts["r1"]})
    assert batch.finish(["r1"]) == alone("llama", {"r1": prompts["r1"]})


def test_when_the_first_is_at_fault_the_others_go_on() -> None:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("no")

    prompts = alike(3)
    batch = Batch()
    params = SamplingParams(max_tokens=NEW, temperature=0, logits_processors=[processor])
    batch.insert({"r0": prompts["r0"]}, params)
    batch.insert({"r1": HEAD + prompts["r0"][200:205] + tokens_of(5, 9), "r2": prompts["r0"]})
    batch.finish(["r1", "r2"])
    assert batch.faults.keys() == {"r0"}


def test_a_model_that_fails_on_the_first_spares_those_that_wait() -> None:
    prompts = alike(3)
    batch = Batch()
    batch.insert(prompts)
    batch.until("r0", 60)
    batch.model.fails = lambda: True
    with pytest.raises(RuntimeError, match="fails"):
        batch.step()
    batch.model.fails = lambda: False
    assert sorted(batch.backend.reset()) == ["r1", "r2"]
    rest = {name: prompts[name] for name in ("r1", "r2")}
    batch.insert(rest)
    assert batch.finish([*rest]) == alone("llama", rest)
    assert (batch.cached["r1"], batch.cached["r2"]) == (0, 200)


def test_a_prompt_with_a_constraint_that_fails_is_at_fault_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = alike(3)
    batch = Batch()
    batch.insert(prompts)
    make = batch.backend._constraint

    def constraint(request: Request, made: Sequence[int]) -> Any:
        if request.request_id == "r1":
            raise ValueError("no such grammar")
        return make(request, made)

    monkeypatch.setattr(batch.backend, "_constraint", constraint)
    assert batch.finish([*prompts])["r2"] == alone("llama", prompts)["r2"]
    assert batch.faults.keys() == {"r1"}


def test_a_preempted_prompt_shares_its_answer_too() -> None:
    prompts = alike(1)
    made = alone("llama", prompts)["r0"]
    batch = Batch()
    batch.insert(prompts)
    for name in ("s0", "s1"):
        batch.backend.insert(
            Request(name, prompts["r0"], GREEDY, seed=0, arrival=0.0), made[:3] if name == "s0" else ()
        )
    batch.until("s0", 213)
    while len(batch.ids["s0"]) < 3:
        batch.step()
    assert batch.ids["s0"][:3] == made[3:]
    assert (batch.cached["s0"], batch.cached["s1"]) == (209, 209)


def test_those_that_wait_hold_no_memory() -> None:
    held = []
    for count in (1, 4):
        batch = Batch()
        batch.insert(alike(count))
        batch.until("r0", 60)
        held.append(batch.backend.memory().kv)
    assert held[0] == held[1] > 0


def test_a_prompt_that_ended_just_before_is_found_by_those_that_waited_for_it() -> None:
    """With a prompt of one token more than what they share, the first has nothing to do behind it."""
    batch = Batch()
    batch.insert({"r0": HEAD[:101], "r1": HEAD[:100] + tokens_of(9, 1), "r2": HEAD[:100] + tokens_of(9, 2)})
    batch.until("r0", 101)
    batch.backend.remove(["r0"], keep=True)
    batch.finish(["r1", "r2"])
    assert (batch.cached["r1"], batch.cached["r2"]) == (100, 100)


def test_what_was_evicted_is_not_waited_for_again() -> None:
    batch = Batch("qwen3_5")
    batch.insert(alike(3))
    batch.until("r0", len(HEAD))
    batch.backend.clear_prefix_cache()
    batch.step()
    assert batch.done["r1"] == batch.done["r2"] > 0


def test_short_beginnings_are_not_waited_for() -> None:
    batch = Batch()
    batch.insert({f"r{i}": HEAD[:8] + tokens_of(20, i) for i in range(3)})
    batch.finish(["r0", "r1", "r2"])
    assert set(batch.cached.values()) == {0}


@pytest.mark.parametrize("scheduler", [{"enable_prefix_cache": False}, {"cache_memory_mb": 0.01}])
def test_nothing_is_shared_without_room_for_prefixes(scheduler: dict[str, Any]) -> None:
    prompts = alike(3)
    batch = Batch(**scheduler)
    batch.insert(prompts)
    assert batch.finish([*prompts]) == alone("llama", prompts)
    assert set(batch.cached.values()) == {0}


def test_those_that_waited_go_before_those_that_came_later() -> None:
    batch = Batch(prefill_batch_size=2)
    batch.insert(alike(3))
    late = {f"s{i}": tokens_of(100, 50 + i) for i in range(4)}
    batch.until("r0", 150)
    batch.insert(late)
    batch.finish(["r0", "r1", "r2", *late])
    assert batch.first.index("r2") < batch.first.index("s1")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_ends_with_the_same_answers(family: str, seed: int) -> None:
    draw = random.Random(seed)
    stems = [tokens_of(120, 30), tokens_of(120, 31)]
    prompts = {
        f"r{i}": draw.choice(stems)[: draw.randrange(10, 121)]
        + tokens_of(draw.randrange(1, 40), draw.randrange(3))
        for i in range(10)
    }
    expected = alone(family, prompts)
    batch = Batch(family, step=draw.choice([16, 64]), prefill_batch_size=draw.choice([2, 8]))
    left = dict(prompts)
    removed = set()
    while left:
        names = draw.sample(sorted(left), min(len(left), draw.randrange(1, 4)))
        batch.insert({name: left.pop(name) for name in names})
        for _ in range(draw.randrange(3)):
            batch.step()
        if draw.random() < 0.3:
            removed.add(names[0])
            batch.backend.remove([names[0]], keep=draw.random() < 0.5)
    rest = [name for name in prompts if name not in removed]
    assert batch.finish(rest) == {name: expected[name] for name in rest}


@pytest.fixture
def engine() -> Iterator[EngineCore]:
    engine = EngineCore(*tiny("llama"), EngineConfig())
    engine.launch()
    engine.wait_ready(30)
    yield engine
    engine.close()


def test_a_burst_in_an_engine_saves_what_it_shares(engine: EngineCore) -> None:
    prompts = alike(8)
    over = threading.Event()
    outputs = []

    def done(output: Any) -> None:
        outputs.append(output)
        if len(outputs) == len(prompts):
            over.set()

    for tokens in prompts.values():
        engine.submit(tokens, GREEDY, on_done=done)
    assert over.wait(30)
    assert sorted(output.cached_tokens for output in outputs) == [0, *[len(HEAD)] * 7]
    assert engine.get_cache_stats()["tokens_saved"] == 7 * len(HEAD)


def test_an_engine_whose_first_is_aborted_answers_the_others(engine: EngineCore) -> None:
    long = tokens_of(1500, 1)
    names = [engine.submit(long + tokens_of(10, 100 + i), GREEDY) for i in range(4)]
    engine.abort(names[0])
    wait_until(lambda: engine.get_stats()["num_requests_processed"] == 4)
    assert engine.get_stats()["total_completion_tokens"] >= 3 * NEW


def test_a_row_that_waits_to_begin_lends_its_state_and_keeps_it() -> None:
    first, second = HEAD[:120] + tokens_of(100, 7), HEAD[:60] + tokens_of(70, 8)
    prompts = {"r0": first + tokens_of(70, 9), "r1": first, "r2": second}
    batch = Batch(step=256, prefill_batch_size=1)
    batch.insert({"r0": prompts["r0"], "r1": first})
    batch.until("r0", len(first) - 1)
    batch.backend._enter_ready()  # r1 has what it waited for, and its turn is still to come
    batch.backend.remove(["r0"], keep=False)
    batch.backend.clear_prefix_cache()
    batch.insert({"r2": second})
    ids = batch.finish(["r1", "r2"])
    assert batch.cached["r2"] == 60
    assert ids == alone("llama", {"r1": first, "r2": second})
