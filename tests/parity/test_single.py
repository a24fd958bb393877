"""One stream at a time says what mlx_lm.stream_generate says, guessed at or not, bounded or not."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import RotatingKVCache
from models import FAMILIES, tiny

from mlx_nb import EngineConfig, EngineCore, ModelLoadError, SamplingParams, SchedulerConfig
from mlx_nb.backends.drafts import Draft, ModelDraft, PromptLookup
from mlx_nb.backends.loader import evaluate
from mlx_nb.backends.single import SingleBackend

PROMPT = "ten jolly foxes judge my 12 vows of quartz and read a tiny corpus aloud " * 3
PROMPTS = ["a", "Hello there", PROMPT]
GREEDY = SamplingParams(max_tokens=40, temperature=0)
TRIED = ["llama", "qwen3_5", "gemma3", "mamba2", "falcon_h1"]


class Noisy:
    """Guesses what another draft does, but is wrong in every third token."""

    def __init__(self, inner: Draft) -> None:
        self._inner = inner

    def begin(self) -> None:
        self._inner.begin()

    def read(self, tokens: Sequence[int], most: int) -> bool:
        return self._inner.read(tokens, most)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        guesses = self._inner.propose(tokens, count)
        return [(g + 1) % 300 if (len(tokens) + i) % 3 == 0 else g for i, g in enumerate(guesses)]


class Measured:
    """A model that notes how many tokens it is fed at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = model.layers
        self.lengths: list[int] = []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.lengths.append(tokens.shape[1])
        logits: mx.array = self._model(tokens, cache=cache)
        return logits


@pytest.fixture
def single() -> Iterator[Callable[..., EngineCore]]:
    engines: list[EngineCore] = []

    def start(
        family: str, draft: Callable[[Any], Draft] | None = None, kind: Any = "plain", **scheduler: Any
    ) -> EngineCore:
        model, tokenizer = tiny(family, kind=kind)
        evaluate(model)

        def make(config: EngineConfig, _: Any) -> SingleBackend:
            return SingleBackend(model, tokenizer, config, draft=draft(model) if draft else None)

        config = EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=1, **scheduler))
        engine = EngineCore(None, None, config, backend=make)
        engines.append(engine)
        engine.launch()
        engine.wait_ready()
        return engine

    yield start
    for engine in engines:
        engine.close()


def alone(family: str, prompt: str, length: int = 40, **options: Any) -> list[int]:
    model, tokenizer = tiny(family)
    responses = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=length, **options))
    return [r.token for r in responses if r.finish_reason != "stop"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_alone(family: str, single: Any) -> None:
    engine = single(family)
    for prompt in PROMPTS:
        assert engine.generate_sync(prompt, GREEDY).output_token_ids == alone(family, prompt)


@pytest.mark.parametrize("family", TRIED)
@pytest.mark.parametrize("draft", [lambda _: PromptLookup(3, 1), ModelDraft, lambda m: Noisy(ModelDraft(m))])
def test_guesses_change_nothing(family: str, draft: Any, single: Any) -> None:
    if draft is not None and family in ("mamba2", "falcon_h1", "qwen3_5", "gemma3"):
        inner, draft = draft, lambda model: _drafted_by_llama(inner, model)
    engine = single(family, draft)
    for prompt in PROMPTS:
        output = engine.generate_sync(prompt, GREEDY)
        assert output.output_token_ids == alone(family, prompt)


def _drafted_by_llama(draft: Any, _: Any) -> Draft:
    """These families can't draft themselves (their caches can't be cut back); another model of the vocabulary can."""
    return draft(tiny("llama")[0])


def test_drafting_for_itself_every_guess_is_right_and_the_target_is_called_less(single: Any) -> None:
    engine = single("llama", ModelDraft)
    output = engine.generate_sync(PROMPT, GREEDY)
    assert output.mtp_drafts > 0
    # The last round may guess beyond the end of the answer.
    assert output.mtp_accepted == output.mtp_drafts
    assert output.completion_tokens == 40


def test_a_stop_string_within_the_guesses_ends_the_answer_there(single: Any) -> None:
    text = single("llama").generate_sync(PROMPT, GREEDY).output_text
    stop = text[9:13]
    output = single("llama", ModelDraft).generate_sync(PROMPT, GREEDY.but(stop=stop))
    assert output.output_text == text[: text.index(stop)]
    assert output.finish_reason == "stop"


def test_max_tokens_within_the_guesses(single: Any) -> None:
    for length in (1, 2, 3, 4, 5, 6, 7):
        output = single("llama", ModelDraft).generate_sync(PROMPT, GREEDY.but(max_tokens=length))
        assert output.output_token_ids == alone("llama", PROMPT, length)
        assert output.finish_reason == "length"


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 1.2, "seed": 3, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.8, "seed": 1, "presence_penalty": 0.7, "repetition_window": 8},
        {"temperature": 0.0, "logit_bias": {42: 4.0, 99: -3.0}},
        {"temperature": 0.0, "logprobs": 3},
    ],
)
def test_sampling_is_the_batch_s_with_and_without_guesses(
    changes: dict[str, Any], single: Any, start: Any
) -> None:
    params = GREEDY.but(**changes)
    expected = start("llama").generate_sync(PROMPT, params)
    for draft in (None, ModelDraft, lambda m: Noisy(ModelDraft(m)), lambda _: PromptLookup()):
        output = single("llama", draft).generate_sync(PROMPT, params)
        assert output.output_token_ids == expected.output_token_ids
        if params.logprobs is not None:
            assert [each.logprob for each in output.logprobs] == pytest.approx(
                [each.logprob for each in expected.logprobs], abs=1e-4
            )


def test_a_schema_holds_with_guesses(single: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = GREEDY.but(schema=schema, max_tokens=60)
    plain = single("llama").generate_sync(PROMPT, params)
    guessed = single("llama", lambda m: Noisy(ModelDraft(m))).generate_sync(PROMPT, params)
    assert guessed.output_text == plain.output_text
    assert set(json.loads(plain.output_text)) == {"name", "age"}


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_a_second_prompt_goes_on_from_what_was_kept(family: str, single: Any) -> None:
    engine = single(family, lambda _: PromptLookup())
    engine.generate_sync(PROMPT, GREEDY, prefix_boundary=20)
    again = engine.generate_sync(PROMPT, GREEDY)
    assert again.cached_tokens > 0
    assert again.output_token_ids == alone(family, PROMPT)


def test_a_draft_reads_what_the_target_had_from_before_in_chunks(single: Any) -> None:
    drafted: list[Measured] = []

    def draft(model: Any) -> Draft:
        drafted.append(Measured(model))
        return ModelDraft(drafted[0])

    engine = single("llama", draft, prefill_step_size=16)
    engine.generate_sync(PROMPT, GREEDY, prefix_boundary=80)
    drafted[0].lengths.clear()
    again = engine.generate_sync(PROMPT, GREEDY)
    assert again.cached_tokens >= 80
    assert max(drafted[0].lengths) <= 16
    assert again.output_token_ids == alone("llama", PROMPT)


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_a_bounded_cache_gives_what_mlx_lm_s_gives(family: str, single: Any) -> None:
    engine = single(family, max_kv_size=24, enable_prefix_cache=False, prefill_step_size=64)
    # mlx-lm leaves the bound out for models that make their own caches: it must be given its caches.
    caches = [RotatingKVCache(24, keep=4) for _ in tiny(family)[0].layers]
    expected = alone(family, PROMPT, prompt_cache=caches, prefill_step_size=64)
    assert engine.generate_sync(PROMPT, GREEDY).output_token_ids == expected
    assert expected != alone(family, PROMPT)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "gpt_oss"])
def test_a_bound_holds_for_models_that_make_their_own_caches(family: str, single: Any) -> None:
    engine = single(family, max_kv_size=12, enable_prefix_cache=False)
    footprint = engine.config and engine._worker.backend.footprint
    assert footprint.bytes([1000]) == footprint.bytes([2000])
    assert engine.generate_sync(PROMPT, GREEDY).completion_tokens == 40


@pytest.mark.parametrize("size", [24, 90])
def test_guesses_change_nothing_where_a_bound_is_reached(size: int, single: Any) -> None:
    plain, guessed = single("llama", max_kv_size=size), single("llama", ModelDraft, max_kv_size=size)
    for prompt in PROMPTS:
        expected = plain.generate_sync(prompt, GREEDY).output_token_ids
        assert guessed.generate_sync(prompt, GREEDY).output_token_ids == expected
    assert guessed.get_stats()["mtp"]["accepted"]


def test_nothing_is_guessed_past_the_last_token_that_was_asked_for(single: Any) -> None:
    engine = single("llama", ModelDraft)
    for length, guesses in ((1, 0), (2, 1), (6, 4)):
        output = engine.generate_sync(PROMPT, GREEDY.but(max_tokens=length, ignore_eos=True))
        assert (output.completion_tokens, output.mtp_drafts, output.mtp_accepted) == (
            length,
            guesses,
            guesses,
        )


def test_a_bound_below_the_tokens_that_stay_is_refused(single: Any) -> None:
    with pytest.raises(ModelLoadError, match="max_kv_size must be above 4"):
        single("llama", max_kv_size=4)


def test_an_abort_stops_between_two_tokens(single: Any) -> None:
    engine = single("llama")
    request = engine.submit(PROMPT, GREEDY.but(max_tokens=10_000, ignore_eos=True))
    stream = engine.stream_sync(request)
    next(stream)
    assert engine.abort(request)
    last = [*stream][-1]
    assert last.finish_reason == "abort"
    assert engine.generate_sync("a", GREEDY).output_token_ids == alone("llama", "a")
