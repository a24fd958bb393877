"""What rows have in common is prefilled once, and changes no answer."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import tiny

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig
from mlx_nb.frames.job import Ask, Outcome
from mlx_nb.frames.sharing import GAIN, LEAST, Work, plan

from .jobs import make_job, run_job

Start = Callable[..., EngineCore]
FAMILIES = ("llama", "qwen3_5", "gemma3", "gpt_oss", "mamba2", "nemotron_h")
PARAMS = SamplingParams(temperature=0, max_tokens=8)
LOWEST, HIGHEST = 5, 300
SHARED = [LOWEST + (i * 37) % (HIGHEST - LOWEST) for i in range(90)]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts an engine of a family."""
    engines = []

    def started(family: str = "llama", **scheduler: Any) -> EngineCore:
        config = EngineConfig(scheduler_config=SchedulerConfig(**{"completion_batch_size": 6} | scheduler))
        engine = EngineCore(*tiny(family), config)
        engines.append(engine)
        engine.launch()
        engine.wait_ready()
        return engine

    yield started
    for engine in engines:
        engine.close()


def tail(number: int, length: int = 7) -> list[int]:
    """Return tokens that begin no other tail."""
    return [LOWEST + number % 200, *random.Random(number).choices(range(LOWEST, HIGHEST), k=length)]


def texts(outcomes: list[Outcome]) -> list[str | None]:
    return [outcome.text for outcome in outcomes]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_rows_that_share_nothing(start: Start, family: str) -> None:
    # Tails of several lengths, a longer prefix that some share, and rows that are like no other.
    rows = [SHARED + tail(i, length=i % 5) for i in range(16)]
    rows += [SHARED + tail(200, length=80) + tail(i) for i in range(6)]
    rows += [tail(300, length=100), tail(301, length=50), [7]]
    random.Random(0).shuffle(rows)

    shared = run_job(start(family), rows, PARAMS)
    apart = run_job(start(family, enable_prefix_cache=False), rows, PARAMS)

    assert texts(shared) == texts(apart)
    assert sum(outcome.cached_tokens > 0 for outcome in shared) == 22
    assert {outcome.cached_tokens for outcome in apart} == {0}


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_what_all_rows_share_is_prefilled_once(start: Start, family: str) -> None:
    core = start(family)

    outcomes = run_job(core, [SHARED + tail(i) for i in range(150)], PARAMS)

    assert {outcome.cached_tokens for outcome in outcomes} == {len(SHARED)}
    stats = core.get_cache_stats()
    assert (stats["hits"], stats["misses"]) == (150, 1)


def test_rows_leave_nothing_else_in_the_prefix_cache(start: Start) -> None:
    core = start()
    run_job(core, [SHARED + tail(i) for i in range(30)], PARAMS)
    once = core.get_cache_stats()["entry_count"]
    outcomes = run_job(core, [SHARED + tail(i) for i in range(30, 60)], PARAMS)

    assert once == core.get_cache_stats()["entry_count"] == 1
    assert {outcome.cached_tokens for outcome in outcomes} == {len(SHARED)}


def test_other_requests_dont_push_the_prefix_out_until_the_job_is_over(start: Start) -> None:
    core = start(cache_memory_mb=0.25, completion_batch_size=2)

    def crowd(number: int) -> None:
        for other in range(5):
            core.generate_sync(tail(1000 + 10 * number + other, length=150), PARAMS.but(max_tokens=1))

    def rows() -> Iterator[list[int]]:
        for number in range(200):
            if number in (70, 140):
                crowd(number)
            yield SHARED + tail(number)

    outcomes = run_job(core, rows(), PARAMS.but(max_tokens=2))

    assert core.get_cache_stats()["evictions"] > 0
    assert {outcome.cached_tokens for outcome in outcomes} == {len(SHARED)}
    crowd(300)
    after = core.generate_sync(SHARED + tail(999), PARAMS)
    assert after.cached_tokens == 0


def test_a_stopped_job_lets_the_prefix_go(start: Start) -> None:
    core = start(cache_memory_mb=0.25)

    def rows() -> Iterator[list[int]]:
        for number in range(5000):
            if number == 150:
                job.stop()
            yield SHARED + tail(number)

    job = make_job(core, rows(), {}, PARAMS)
    job.run()
    assert job.snapshot().state == "stopped"
    for other in range(5):
        core.generate_sync(tail(1000 + other, length=150), PARAMS.but(max_tokens=1))

    assert core.generate_sync(SHARED + tail(999), PARAMS).cached_tokens == 0


def test_questions_about_long_texts_share_text_by_text(start: Start) -> None:
    books = [[*SHARED, *tail(i, length=120)] for i in range(5)]
    rows = [books[i % 5] + tail(100 + i) for i in range(40)]

    outcomes = run_job(start(), rows, PARAMS)

    assert {outcome.cached_tokens for outcome in outcomes} == {len(books[0])}


def test_answers_drawn_from_one_prompt_share_all_but_its_last_token(start: Start) -> None:
    outcomes = run_job(start(), [SHARED] * 10, SamplingParams(temperature=1.0, max_tokens=8))

    assert len(set(texts(outcomes))) > 1
    assert {outcome.cached_tokens for outcome in outcomes} == {len(SHARED) - 1}


def test_a_template_that_changes_on_the_way_is_found_again(start: Start) -> None:
    other = list(reversed(SHARED))
    rows = [SHARED + tail(i) for i in range(100)] + [other + tail(i) for i in range(100)]

    outcomes = run_job(start(), rows, PARAMS.but(max_tokens=1))

    assert [outcome.cached_tokens for outcome in outcomes] == [len(SHARED)] * 200


def test_short_beginnings_are_not_worth_it(start: Start) -> None:
    core = start()
    run_job(core, [SHARED[: LEAST // 4] + tail(i) for i in range(30)], PARAMS.but(max_tokens=1))

    assert core.get_cache_stats()["entry_count"] == 0


def test_texts_share_as_tokens_do(start: Start) -> None:
    core = start()
    instruction = "Sphinx of black quartz, judge my vow. " * 12
    rows = [f"{instruction}{number}" for number in range(20)]

    outcomes = run_job(core, rows, PARAMS)

    assert min(outcome.cached_tokens for outcome in outcomes) > LEAST
    assert texts(outcomes) == texts(run_job(start(enable_prefix_cache=False), rows, PARAMS))


def test_a_prefix_that_fails_is_its_rows_error_and_hangs_nobody(start: Start) -> None:
    core = start(enable_prefix_cache=True)
    outcomes: dict[int, Outcome] = {}
    rows = [SHARED + tail(i) for i in range(20)]
    job = make_job(core, rows, outcomes, PARAMS)
    submit = core.submit

    def stopping(*args: Any, **options: Any) -> str:
        request = submit(*args, **options)
        core.stop_soon()
        return request

    core.submit = stopping
    job.run()

    assert {outcome.finish_reason for outcome in outcomes.values()} == {"error"}
    assert len(outcomes) == 20


# -- the plan ---------------------------------------------------------------------------------------------------

parts = st.lists(st.integers(0, 2), min_size=0, max_size=4)


@given(st.lists(parts, min_size=1, max_size=20), st.lists(parts, max_size=20))
def test_a_plan_gives_rows_prefixes_that_they_begin_with(
    some: list[list[int]], more: list[list[int]]
) -> None:
    def works(rows: list[list[int]]) -> list[Work]:
        # Each part is forty tokens of its own, so that beginnings are long enough to matter.
        tokens = [[9, *(part for part in row for _ in range(40)), number] for number, row in enumerate(rows)]
        return [Work(number, Ask(its, "", PARAMS), None, tokens=its) for number, its in enumerate(tokens)]

    first, second = works(some), works(more)
    known = plan(first, [])
    for batch, prefixes in ((first, known), (second, known + plan(second, known))):
        for work in batch:
            assert work.prefix is None or (work.prefix in prefixes and work.prefix.begins(work.tokens))
    for prefix in known:
        assert len(prefix.lead) == prefix.length + 1
        alike = [work for work in first if prefix.begins(work.tokens)]
        parent = prefix.parent.length if prefix.parent else 0
        assert prefix.length - parent >= LEAST
        assert (prefix.length - parent) * (len(alike) - 1) >= GAIN
        assert prefix.parent is None or prefix.parent.begins(prefix.lead)
