"""What backends/generator.py relies on in mlx-lm's BatchGenerator, private parts included.

When one of these fails after an upgrade of mlx-lm, backends/generator.py is what has to change.
"""

import inspect
from collections import deque
from dataclasses import fields
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import FAMILIES, tiny

from mlx_nb.backends.batch import PREFILL_ALONE

PROMPT = [300, 20, 31, 45, 52, 60, 77, 81, 90, 101, 120]


def argmax(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


@pytest.fixture
def generator() -> BatchGenerator:
    return BatchGenerator(tiny()[0], sampler=argmax, prefill_batch_size=4, prefill_step_size=64)


def insert(generator: BatchGenerator, *segments: list[int], **options: Any) -> int:
    (uid,) = generator.insert_segments([list(segments)], max_tokens=[1 << 62], **options)
    return int(uid)


def run(generator: BatchGenerator, steps: int) -> tuple[list[Any], list[Any]]:
    steps_done = [generator.next() for _ in range(steps)]
    return [r for prompts, _ in steps_done for r in prompts], [r for _, tokens in steps_done for r in tokens]


def test_arguments_have_the_names_that_are_used() -> None:
    made = inspect.signature(BatchGenerator.__init__).parameters
    assert {"sampler", "completion_batch_size", "prefill_batch_size", "prefill_step_size"} <= set(made)
    inserted = list(inspect.signature(BatchGenerator.insert_segments).parameters)
    assert inserted[1:5] == ["segments", "max_tokens", "caches", "all_tokens"]
    assert list(inspect.signature(GenerationBatch._step).parameters) == ["self"]
    assert list(inspect.signature(PromptProcessingBatch.generate).parameters) == ["self", "tokens"]
    assert list(inspect.signature(GenerationBatch.empty).parameters)[:2] == ["model", "fallback_sampler"]
    assert "prefill_step_size" in inspect.signature(PromptProcessingBatch.empty).parameters
    assert list(inspect.signature(GenerationBatch.__init__).parameters)[1:] == [
        "model", "uids", "inputs", "prompt_cache", "tokens", "samplers", "fallback_sampler", "logits_processors",
        "stop_sequences", "max_tokens",
    ]  # fmt: skip
    assert [f.name for f in fields(GenerationBatch.Response)] == [
        "uid", "token", "logprobs", "finish_reason", "prompt_cache", "all_tokens",
    ]  # fmt: skip


def test_private_parts_are_where_they_are_looked_for(generator: BatchGenerator) -> None:
    assert isinstance(generator._prompt_batch, PromptProcessingBatch)
    assert isinstance(generator._generation_batch, GenerationBatch)
    assert isinstance(generator._unprocessed_sequences, deque)
    assert generator._prompt_batch.fallback_sampler is argmax
    assert generator._counters.prompt_tokens == 0
    assert generator._counters.prompt_time == 0
    assert generator.prefill_step_size == 64
    insert(generator, list(PROMPT))
    run(generator, 3)
    assert generator._counters.prompt_tokens == len(PROMPT) - 1
    assert generator._counters.prompt_time > 0
    assert generator.prompt_cache_nbytes > 0


def test_both_batches_keep_their_class_and_name_their_rows() -> None:
    calls: list[tuple[str, list[int]]] = []

    class Prompts(PromptProcessingBatch):
        def generate(self, tokens: Any) -> Any:
            calls.append(("first", list(self.uids)))
            return super().generate(tokens)

    class Rows(GenerationBatch):
        def _step(self) -> Any:
            calls.append(("next", list(self.uids)))
            return super()._step()

    sampled: list[int] = []

    def sampler(logprobs: mx.array) -> mx.array:
        sampled.append(logprobs.shape[0])
        return argmax(logprobs)

    generator = BatchGenerator(tiny()[0], sampler=sampler, prefill_batch_size=2)
    generator._prompt_batch = Prompts.empty(generator.model, sampler, prefill_step_size=64)
    generator._generation_batch = Rows.empty(generator.model, sampler)
    uids = [insert(generator, list(PROMPT)), insert(generator, PROMPT[:4])]
    run(generator, 2)
    uids.append(insert(generator, PROMPT[:6]))
    run(generator, 6)
    generator.remove([uids[1]])
    run(generator, 2)
    # One call of the shared sampler for each announcement, with as many rows as were named.
    assert sampled == [len(named) for _, named in calls]
    assert calls[0] == ("first", uids[:2])
    assert ("first", [uids[2]]) in calls
    assert calls[-1] == ("next", [uids[0], uids[2]])


def test_a_segments_end_is_told_with_the_cache_covering_exactly_that(generator: BatchGenerator) -> None:
    uid = insert(generator, PROMPT[:4], PROMPT[4:])
    prompts, _ = generator.next()
    assert [(r.uid, r.progress, r.end_of_segment, r.end_of_prompt) for r in prompts] == [
        (uid, (4, len(PROMPT)), True, False)
    ]
    state, tokens = generator.extract_cache([uid])[uid]
    assert list(tokens) == PROMPT[:4]
    assert {c.offset for c in state} == {4}


def test_the_last_token_is_a_segment_of_its_own_and_its_end_is_the_prompts(generator: BatchGenerator) -> None:
    insert(generator, list(PROMPT))
    prompts, _ = run(generator, 3)
    assert [r.progress for r in prompts] == [(10, 11), (11, 11)]
    assert [r.end_of_segment for r in prompts] == [True, True]
    assert [r.end_of_prompt for r in prompts] == [False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_cache_covers_prompt_and_every_token_told(family: str) -> None:
    generator = BatchGenerator(tiny(family)[0], sampler=argmax)
    uid = insert(generator, list(PROMPT))
    other = insert(generator, PROMPT[:3])
    _, tokens = run(generator, 8)
    told = [r.token for r in tokens if r.uid == uid]
    state, covered = generator.extract_cache([uid])[uid]
    assert list(covered) == PROMPT + told
    for part in state:
        if isinstance(part, KVCache):
            assert part.offset == len(covered)
    assert set(generator.extract_cache([uid, other])) == {uid, other}


def test_a_row_resumes_from_a_cache_and_leaves_it_alone(generator: BatchGenerator) -> None:
    uid = insert(generator, list(PROMPT))
    _, tokens = run(generator, 12)
    told = [r.token for r in tokens if r.uid == uid]
    generator.remove([uid])
    state = make_prompt_cache(generator.model)
    generator.model(mx.array([PROMPT[:6]]), cache=state)
    mx.eval([c.state for c in state])
    resumed = insert(generator, PROMPT[6:], caches=[state], all_tokens=[PROMPT[:6]])
    _, tokens = run(generator, 12)
    assert [r.token for r in tokens if r.uid == resumed] == told[: len(tokens)]
    assert {c.offset for c in state} == {6}


def test_the_next_token_of_a_row_is_sampled_and_not_yet_in_its_cache(generator: BatchGenerator) -> None:
    insert(generator, list(PROMPT))
    _, told = run(generator, 5)
    rows = generator._generation_batch
    coming, logprobs = rows._next_tokens, rows._next_logprobs
    assert coming.shape == (1,)
    assert len(logprobs) == 1
    assert rows.tokens == [PROMPT + [r.token for r in told]]
    assert rows.extract_cache(0)[0].offset == len(rows.tokens[0])
    _, (response,) = generator.next()
    assert response.token == coming.item()
    assert mx.array_equal(response.logprobs, logprobs[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_may_bring_its_next_token_into_a_batch(family: str) -> None:
    """A batch made of one row would feed that token at once: its first step is left out, and goes with the others."""

    class Joining(GenerationBatch):
        steps = 0

        def _step(self) -> Any:
            self.steps += 1
            return [], []

    generator = BatchGenerator(tiny(family)[0], sampler=argmax)
    uid = insert(generator, list(PROMPT))
    _, told = run(generator, 6)
    rows = generator._generation_batch
    state, tokens, coming = rows.extract_cache(0), rows.tokens[0], rows._next_tokens
    _, expected = run(generator, 8)
    generator.remove([uid])
    tokens = tokens[: len(PROMPT) + len(told)]

    other = insert(generator, PROMPT[:4])
    run(generator, 3)
    caches = [cache.merge([cache]) for cache in state]
    options = [argmax], argmax, [()], [StopSequences()], [1 << 62]
    joining = Joining(generator.model, [uid], coming, caches, [tokens], *options)
    assert joining.steps == 1
    assert joining._next_tokens is coming
    joining._next_logprobs = [mx.zeros((1,))]
    generator._generation_batch.extend(joining)
    assert generator._generation_batch.uids == [other, uid]
    _, after = run(generator, 8)
    assert [r.token for r in after if r.uid == uid] == [r.token for r in expected]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_row_can_be_removed_in_every_phase(generator: BatchGenerator, steps: int) -> None:
    generator.prefill_step_size = 4
    kept = insert(generator, PROMPT[:5])
    gone = insert(generator, list(PROMPT))
    run(generator, steps)
    generator.remove([gone])
    _, tokens = run(generator, 8)
    assert {r.uid for r in tokens} == {kept}
    assert gone not in generator.extract_cache([gone])


def test_logprobs_come_before_sampling_and_over_the_whole_vocabulary(generator: BatchGenerator) -> None:
    insert(generator, list(PROMPT))
    _, tokens = run(generator, 4)
    for response in tokens:
        assert response.logprobs.ndim == 1
        assert mx.logsumexp(response.logprobs).item() == pytest.approx(0, abs=1e-4)


def test_a_window_that_rotated_in_prefill_still_needs_to_be_put_in_order() -> None:
    """When this fails, mlx-lm's mask is right by itself: `generator._Prefilling` need not see to it."""
    generator = BatchGenerator(tiny("gemma3")[0], sampler=argmax, prefill_batch_size=2, prefill_step_size=24)
    long, late = list(range(20, 70)), list(range(30, 80))
    told = []
    for beside in (False, True):
        if beside:
            insert(generator, long)
            run(generator, 2)
        uid = insert(generator, late[:1], late[1:])  # its first chunk is one token, as is the other's last
        told.append([r.token for r in run(generator, 12)[1] if r.uid == uid][:6])
        generator.remove([uid])
    assert told[0] != told[1]


def test_nemotron_h_still_needs_its_prompts_prefilled_alone() -> None:
    """When this fails, mlx-lm tells its state-space layers the rows' lengths: empty `batch.PREFILL_ALONE`."""
    model = tiny("nemotron_h")[0]
    prompts = [PROMPT, PROMPT[:5]]
    alone = []
    for prompt in prompts:
        generator = BatchGenerator(model, sampler=argmax)
        insert(generator, prompt)
        alone.append([r.token for r in run(generator, 16)[1]])
    padded = BatchGenerator(model, sampler=argmax, prefill_batch_size=2)
    uids = [insert(padded, prompt) for prompt in prompts]
    tokens = run(padded, 16)[1]
    together = [[r.token for r in tokens if r.uid == uid] for uid in uids]
    assert together[0] == alone[0]
    assert together[1] != alone[1]
    assert model.model_type in PREFILL_ALONE


def test_a_rows_first_token_is_drawn_as_its_prompt_ends_and_told_a_step_later(
    generator: BatchGenerator,
) -> None:
    uid = insert(generator, list(PROMPT))
    prompts, told = run(generator, 2)
    batch = generator._generation_batch
    assert prompts[-1].end_of_prompt
    assert (told, batch.uids, batch._num_tokens) == ([], [uid], [0])
    first = batch._next_tokens.tolist()
    _, told = generator.next()
    assert [response.token for response in told] == first
    assert batch._num_tokens == [1]


def test_segments_can_be_cut_before_a_row_begins_and_while_it_is_prefilled(generator: BatchGenerator) -> None:
    generator.prefill_step_size = 4
    uid = insert(generator, list(PROMPT))
    ((queued, segments, *_),) = generator._unprocessed_sequences
    assert (queued, segments) == (uid, [PROMPT[:-1], PROMPT[-1:]])
    segments[:1] = [PROMPT[:3], PROMPT[3:-1]]
    prompts, _ = generator.next()
    assert prompts[0].progress == (3, len(PROMPT))
    assert generator._prompt_batch.uids == [uid]
    ((segments, done, total),) = generator._currently_processing
    assert (segments, done, total) == ([PROMPT[3:-1], PROMPT[-1:]], 3, len(PROMPT))
    segments[:1] = [PROMPT[3:5], PROMPT[5:-1]]
    prompts, _ = generator.next()
    assert (prompts[0].progress, prompts[0].end_of_segment) == ((5, len(PROMPT)), True)
