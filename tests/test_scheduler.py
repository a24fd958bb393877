"""Who runs next: order, slots, prefill budget, memory, and room made by the youngest."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_nb import SamplingParams, SchedulerConfig
from mlx_nb.footprint import KVFootprint
from mlx_nb.request import Request
from mlx_nb.scheduler import Scheduler


def request(name: str, length: int = 10, priority: int = 0) -> Request:
    return Request(name, [1] * length, SamplingParams(), seed=0, arrival=0.0, priority=priority)


def scheduler(**config: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**config))


def admitted(scheduler: Scheduler) -> list[str]:
    return [r.request_id for r in scheduler.schedule()]


def add(scheduler: Scheduler, *requests: Request) -> None:
    for each in requests:
        scheduler.add(each)


def test_requests_run_in_order_of_arrival() -> None:
    queue = scheduler()
    add(queue, *(request(name, priority=-ord(name)) for name in "bca"))
    assert admitted(queue) == ["b", "c", "a"]


def test_under_the_priority_policy_lower_goes_first_and_then_arrival() -> None:
    queue = scheduler(policy="priority")
    add(queue, request("a", priority=5), request("b"), request("c", priority=5), request("d", priority=-1))
    assert admitted(queue) == ["d", "b", "a", "c"]


def test_no_more_run_than_there_are_slots() -> None:
    queue = scheduler(max_num_seqs=2)
    add(queue, *(request(name) for name in "abcd"))
    assert admitted(queue) == ["a", "b"]
    assert admitted(queue) == []
    assert queue.remove("a")
    assert admitted(queue) == ["c"]


def test_the_smaller_of_both_bounds_counts_as_slots() -> None:
    queue = scheduler(max_num_seqs=8, completion_batch_size=1)
    add(queue, request("a"), request("b"))
    assert admitted(queue) == ["a"]


def test_prompts_wait_for_the_prefill_budget() -> None:
    queue = scheduler(max_num_batched_tokens=100)
    add(queue, request("a", 60), request("b", 30), request("c", 30))
    assert admitted(queue) == ["a", "b"]
    queue.prefilled("a", 50)
    assert admitted(queue) == []
    queue.prefilled("a", 40)
    assert admitted(queue) == ["c"]


def test_a_prompt_over_the_whole_budget_runs_once_nothing_else_is_in_prefill() -> None:
    queue = scheduler(max_num_batched_tokens=100)
    add(queue, request("a", 50), request("long", 500), request("b", 10))
    assert admitted(queue) == ["a"]
    queue.prefilled("a", 0)
    assert admitted(queue) == ["long"]
    queue.prefilled("long", 90)
    assert admitted(queue) == ["b"]


def test_the_head_of_the_line_is_never_overtaken() -> None:
    queue = scheduler(max_num_batched_tokens=100)
    add(queue, request("a", 90), request("head", 50), request("small", 1))
    assert admitted(queue) == ["a"]
    assert admitted(queue) == []
    queue.prefilled("a", 0)
    assert admitted(queue) == ["head", "small"]


def test_a_removed_request_never_runs() -> None:
    queue = scheduler(max_num_seqs=1)
    add(queue, request("a"), request("b"), request("c"))
    assert admitted(queue) == ["a"]
    assert not queue.remove("b")
    assert not queue.remove("nobody")
    assert queue.remove("a")
    assert admitted(queue) == ["c"]


def test_an_id_that_was_removed_can_come_back_at_the_end_of_the_line() -> None:
    queue = scheduler(max_num_seqs=1)
    add(queue, request("a"), request("b"))
    queue.remove("a")
    queue.add(request("a"))
    assert admitted(queue) == ["b"]
    queue.remove("b")
    assert admitted(queue) == ["a"]


def test_it_is_idle_once_all_are_gone() -> None:
    queue = scheduler(max_num_seqs=1)
    assert not queue
    add(queue, request("a"), request("b"))
    assert queue
    queue.schedule()
    queue.clear()
    assert not queue
    assert admitted(queue) == []


# -- memory ---------------------------------------------------------------------------------------------


def bounded(tokens: int, **config: Any) -> Scheduler:
    """One byte a token and row, in steps of 256."""
    return Scheduler(SchedulerConfig(**config), KVFootprint(per_token=1), tokens)


def test_a_row_that_would_not_fit_waits() -> None:
    queue = bounded(600)
    add(queue, request("a", 100), request("b", 100), request("c", 100))
    assert admitted(queue) == ["a", "b"]
    queue.remove("a")
    assert admitted(queue) == ["c"]


def test_one_request_runs_whatever_the_budget() -> None:
    queue = bounded(1)
    add(queue, request("a", 5000), request("b"))
    assert admitted(queue) == ["a"]
    assert queue.preempt() == []


def test_when_rows_outgrow_the_memory_the_youngest_waits_again_in_its_old_place() -> None:
    queue = bounded(600)
    add(queue, request("a", 200), request("b", 200), request("c", 10))
    assert admitted(queue) == ["a", "b"]
    for _ in range(60):
        queue.grew("a")
    assert [r.request_id for r in queue.preempt()] == ["b"]
    assert queue.running == ["a"]
    queue.remove("a")
    assert admitted(queue) == ["b", "c"]


def test_kv_bytes_are_those_of_the_rows_at_the_longest_ones_length() -> None:
    queue = bounded(10_000)
    add(queue, request("a", 10), request("b", 300))
    assert queue.kv_bytes() == 0
    queue.schedule()
    assert queue.kv_bytes() == 2 * 512


@pytest.mark.parametrize(("length", "expected"), [(1, 256 + 60), (100, 256 + 60), (300, 512 + 60)])
def test_a_footprint_counts_windows_and_fixed_parts(length: int, expected: int) -> None:
    footprint = KVFootprint(per_token=1, windows=((1, 50),), fixed=10)
    assert footprint.bytes([length]) == expected
    assert footprint.bytes([length] * 3) == 3 * expected
    assert footprint.bytes([]) == 0


# -- always ---------------------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(
        st.sampled_from(["add", "schedule", "finish", "prefill", "grow", "remove"]), st.integers(0, 400)
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(moves, st.integers(1, 4), st.integers(1, 300), st.sampled_from([None, 300, 900]))
def test_every_request_runs_once_and_within_bounds(  # noqa: C901  one branch a move
    moves: list[tuple[str, int]], slots: int, tokens: int, budget: int | None
) -> None:
    config = SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=tokens)
    queue = Scheduler(config, KVFootprint(per_token=1), budget)
    waiting: list[str] = []
    running: list[str] = []
    number = 0

    def step() -> None:
        for back in queue.preempt():
            running.remove(back.request_id)
            waiting.append(back.request_id)
        waiting.sort(key=int)
        for new in queue.schedule():
            assert new.request_id == waiting.pop(0)  # in order, and nobody twice
            running.append(new.request_id)
        assert len(running) <= slots
        assert queue.running == running
        assert bool(queue) == bool(waiting or running)

    for move, size in moves:
        some = running[size % len(running)] if running else None
        if move == "add":
            queue.add(request(str(number), 1 + size))
            waiting.append(str(number))
            number += 1
        elif move == "schedule":
            step()
        elif move == "remove" and waiting:
            queue.remove(waiting.pop(size % len(waiting)))
        elif some is not None and move == "finish":
            assert queue.remove(some)
            running.remove(some)
        elif some is not None and move == "prefill":
            queue.prefilled(some, size // 2)
        elif some is not None and move == "grow":
            queue.grew(some)
    for _ in range(2 * number + 1):  # and the queue drains
        step()
        for name in list(running):
            queue.prefilled(name, 0)
            queue.remove(name)
            running.remove(name)
    assert not queue
    assert waiting == []


def test_while_paused_only_what_was_preempted_is_admitted() -> None:
    queue = bounded(600, policy="priority")
    add(queue, request("a", 200), request("b", 200, priority=1))
    assert admitted(queue) == ["a", "b"]
    for _ in range(60):
        queue.grew("a")
    assert [each.request_id for each in queue.preempt()] == ["b"]
    queue.paused = True
    add(queue, request("c", priority=-1))
    assert queue
    assert admitted(queue) == []
    queue.remove("a")
    assert admitted(queue) == ["b"]
    queue.remove("b")
    assert not queue
    queue.paused = False
    assert admitted(queue) == ["c"]
    assert admitted(queue) == []
