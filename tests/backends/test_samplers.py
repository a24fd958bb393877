"""Draws follow the distribution that the parameters describe; edits of logits follow their formulas."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors
from models import tiny

from mlx_nb import EngineCore, SamplingParams
from mlx_nb.backends.draws import likeliest
from mlx_nb.backends.samplers import RowSampler
from mlx_nb.request import Request

Array = Any
RNG = np.random.default_rng(7)
LOGITS = (2 * RNG.standard_normal(40)).astype(np.float32)


def hot(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_p": 1.0} | changes)


def request(params: SamplingParams, seed: int = 0, prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request(f"r{seed}", list(prompt), params, seed, arrival=0.0)


def step(sampler: RowSampler, uids: list[int], logits: Array) -> list[int]:
    """One call as a batch makes it: the model's output is seen first, its log-probabilities are sampled from."""
    logits = mx.array(logits)
    sampler.expect(uids)
    sampler.observe(logits[:, None, :])
    tokens: list[int] = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    return tokens


def counts(params: SamplingParams, logits: Array = LOGITS, draws: int = 4000) -> Array:
    """How often each token is drawn, each draw with a seed of its own."""
    sampler = RowSampler()
    for seed in range(draws):
        sampler.add(seed, request(params, seed))
    tokens = step(sampler, list(range(draws)), np.tile(logits, (draws, 1)))
    return np.bincount(tokens, minlength=len(logits))


def probabilities(params: SamplingParams, logits: Array = LOGITS) -> Array:
    """What the parameters describe: temperature, then top_k, top_p of what is left, then min_p."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    kept = np.zeros(len(p), dtype=bool)
    kept[order[: params.top_k or len(p)]] = True
    p = np.where(kept, p, 0) / p[kept].sum()
    before = np.cumsum(p[order]) - p[order]
    kept[order] &= before < params.top_p
    kept &= p >= params.min_p * p.max()
    p = np.where(kept, p, 0)
    return p / p.sum()


SHAPES = {
    "plain": {},
    "cool": {"temperature": 0.5},
    "warm": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k of 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "a tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "min_p of 1": {"min_p": 1.0},
    "all": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    "the defaults": {"temperature": 0.7, "top_p": 0.9},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_follow_the_distribution(shape: str) -> None:
    params = hot(**SHAPES[shape])
    expected = probabilities(params)
    drawn = counts(params)
    assert drawn[expected == 0].sum() == 0
    support = expected > 0
    expected = expected[support] * drawn.sum()
    chi_square = ((drawn[support] - expected) ** 2 / expected).sum()
    freedom = max(support.sum() - 1, 1)
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "changes", [{"top_p": 0.5}, {"top_p": 0.999}, {"min_p": 1e-4}, {"top_k": 3}, {"top_k": 2000}]
)
def test_a_large_vocabulary_is_cut_where_the_whole_would_be(changes: dict[str, Any]) -> None:
    logits = (0.3 * RNG.standard_normal(5000)).astype(np.float32)  # flat: a nucleus takes thousands
    params = hot(**changes)
    allowed = probabilities(params, logits) > 0
    drawn = np.flatnonzero(counts(params, logits, 300))
    # A token at the very edge may fall to either side by rounding.
    assert allowed[drawn].mean() > 0.98
    assert len(drawn) > min(0.4 * allowed.sum(), 100)


@pytest.mark.parametrize("size", [20_000, 20_001])
@pytest.mark.parametrize("count", [1, 64, 128, 1000, 30_000])
def test_the_likeliest_of_a_large_vocabulary_are_found(size: int, count: int) -> None:
    scores = np.round(RNG.standard_normal((3, size)) * 4, 2).astype(np.float32)  # with ties
    scores[1, 500:] = -np.inf
    ids, values = (np.array(each) for each in likeliest(mx.array(scores), count))
    count = min(count, size)
    assert (values == -np.sort(-scores, axis=-1)[:, :count]).all()
    finite = values > -np.inf
    assert (np.take_along_axis(scores, np.minimum(ids, size - 1), axis=-1)[finite] == values[finite]).all()
    assert all(len(set(row[mask])) == mask.sum() for row, mask in zip(ids, finite, strict=True))


@pytest.mark.parametrize("changes", [{"top_p": 0.6}, {"top_k": 50}, {"top_p": 0.9, "min_p": 0.02}])
def test_a_nucleus_of_a_large_vocabulary_is_cut_where_the_whole_would_be(changes: dict[str, Any]) -> None:
    logits = (-1.1 * np.log(RNG.permutation(20_000) + 1)).astype(np.float32)  # some tokens, and a long tail
    params = hot(**changes)
    expected = probabilities(params, logits)
    drawn = counts(params, logits, 200)
    assert (expected[np.flatnonzero(drawn)] > 0).mean() > 0.98
    likely = expected > 0.02
    assert abs(drawn[likely].sum() / 200 - expected[likely].sum()) < 0.15


def test_a_row_is_drawn_alike_whatever_the_others_ask_for() -> None:
    logits = (0.5 * RNG.standard_normal((6, 3000))).astype(np.float32)
    shapes = [hot(top_p=0.9), hot(), hot(top_k=2500), hot(min_p=0.001), hot(temperature=0), hot(top_k=4)]
    together = RowSampler()
    for uid, params in enumerate(shapes):
        together.add(uid, request(params, uid))
    tokens = step(together, list(range(6)), logits)
    for uid, params in enumerate(shapes):
        alone = RowSampler()
        alone.add(uid, request(params, uid))
        assert step(alone, [uid], logits[uid : uid + 1]) == [tokens[uid]]


def test_half_precision_rows_dont_notice_an_edited_neighbour() -> None:
    rows = 3000
    logits = mx.array(3 * RNG.standard_normal((rows + 1, 60))).astype(mx.bfloat16)
    alone, beside = RowSampler(), RowSampler()
    for sampler in (alone, beside):
        for uid in range(rows):
            sampler.add(uid, request(hot(temperature=uid % 4), uid))
        sampler.add(rows, request(hot(logit_bias={3: 1.0}), rows))
    assert step(alone, list(range(rows)), logits[:rows]) == step(beside, list(range(rows + 1)), logits)[:rows]


def test_rows_are_found_by_id_in_any_order() -> None:
    sampler = RowSampler()
    sampler.add(10, request(hot(temperature=0)))
    sampler.add(20, request(hot(temperature=0, logit_bias={0: 100.0})))
    assert step(sampler, [20, 10], np.tile(LOGITS, (2, 1))) == [0, int(LOGITS.argmax())]
    sampler.discard(20)
    assert step(sampler, [10], LOGITS[None]) == [int(LOGITS.argmax())]


@pytest.mark.parametrize("temperature", [1e-30, 1e-9, 1e-4])
def test_a_temperature_next_to_zero_is_greedy(temperature: float) -> None:
    for top_p in (1.0, 0.9):
        params = hot(temperature=temperature, top_p=top_p, logit_bias={0: 0.0})  # on logits, either sign
        assert counts(params, draws=20)[LOGITS.argmax()] == 20


# -- edits ----------------------------------------------------------------------------------------------

EDITS = {
    "repetition": {"repetition_penalty": 1.5},
    "repetition below 1": {"repetition_penalty": 0.8},
    "a window": {"repetition_penalty": 1.5, "repetition_window": 4},
    "a window of one": {"repetition_penalty": 2.0, "repetition_window": 1},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "all": {
        "logit_bias": {5: 1.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
}


def edited(params: SamplingParams, logits: Array, prompt: list[int], output: list[int]) -> Array:
    """The formulas: bias, repetition over prompt and output, presence and frequency over the output."""
    logits = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    window = params.repetition_window or len(prompt) + len(output)
    for token in set((prompt + output)[-window:]):
        scale = params.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return logits


@pytest.mark.parametrize("edit", EDITS)
def test_penalties_and_bias_follow_their_formulas(edit: str) -> None:
    params = hot(temperature=0, **EDITS[edit])
    prompt = [3, 9, 9, 12, int(LOGITS.argmax()), 3]
    sampler = RowSampler()
    sampler.add(0, request(params, prompt=tuple(prompt)))
    rng, output = np.random.default_rng(3), []
    for _ in range(25):
        logits = (LOGITS + rng.standard_normal(40)).astype(np.float32)
        expected = int(edited(params, logits, prompt, output).argmax())
        assert step(sampler, [0], logits[None]) == [expected]
        output.append(expected)


def test_the_repetition_penalty_is_mlx_lms() -> None:
    (processor,) = make_logits_processors(repetition_penalty=1.4, repetition_context_size=5)
    params = hot(temperature=0, repetition_penalty=1.4, repetition_window=5)
    prompt = [2, 4, 8, 16, 32, 1]
    sampler = RowSampler()
    sampler.add(0, request(params, prompt=tuple(prompt)))
    rng, tokens = np.random.default_rng(4), list(prompt)
    for _ in range(15):
        logits = (LOGITS + rng.standard_normal(40)).astype(np.float32)
        expected = int(mx.argmax(processor(mx.array(tokens), mx.array(logits[None]))).item())
        assert step(sampler, [0], logits[None]) == [expected]
        tokens.append(expected)


def test_edits_are_those_of_a_row_alone_whoever_comes_and_goes() -> None:
    rng = np.random.default_rng(6)
    shapes = [
        hot(temperature=0),
        *(hot(temperature=uid % 2, **each) for uid, each in enumerate(EDITS.values())),
    ]
    prompts = [tuple(rng.integers(0, 40, 3 + 4 * uid).tolist()) for uid in range(len(shapes))]
    logits = [(LOGITS + rng.standard_normal((len(shapes), 40))).astype(np.float32) for _ in range(24)]
    company = RowSampler()
    alone = [RowSampler() for _ in shapes]
    for sampler in (company, *alone):
        for uid, params in enumerate(shapes):
            sampler.add(uid, request(params, uid, prompts[uid]))
    for turn, step_logits in enumerate(logits):
        uids = [uid for uid in rng.permutation(len(shapes)).tolist() if (uid + turn // 3) % 4]
        tokens = step(company, uids, step_logits[uids])
        assert tokens == [step(alone[uid], [uid], step_logits[uid : uid + 1])[0] for uid in uids]


def test_a_resumed_row_goes_on_as_if_it_had_never_left() -> None:
    params = hot(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, top_k=20)
    rng = np.random.default_rng(5)
    logits = [(LOGITS + rng.standard_normal(40)).astype(np.float32)[None] for _ in range(12)]
    through = RowSampler()
    through.add(0, request(params, 11))
    tokens = [step(through, [0], row)[0] for row in logits]
    resumed = RowSampler()
    resumed.add(0, request(params, 11), made=tokens[:6])
    assert [step(resumed, [0], row)[0] for row in logits[6:]] == tokens[6:]


# -- processors, in an engine ---------------------------------------------------------------------------


@pytest.fixture
def engine() -> Any:
    engine = EngineCore(*tiny())
    engine.launch()
    yield engine
    engine.close()


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0} | changes)


def test_a_processor_sees_the_tokens_so_far_and_decides_the_next(engine: EngineCore) -> None:
    seen: list[list[int]] = []

    def seven(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return mx.where(mx.arange(logits.shape[-1]) == 7 + len(seen), 0.0, -mx.inf)[None]

    output = engine.generate_sync([40, 41], greedy(max_tokens=3, logits_processors=[seven]))
    assert output.output_token_ids == [8, 9, 10]
    assert seen[:3] == [[40, 41], [40, 41, 8], [40, 41, 8, 9]]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_processor_that_raises_ends_its_own_row_only(engine: EngineCore, after: int) -> None:
    calls = 0

    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > after:
            raise ZeroDivisionError("mine")
        return logits

    prompts = ["one", "two and more", "three"]
    alone = [output.output_token_ids for output in engine.generate_batch_sync(prompts, greedy())]
    params = [greedy(), greedy(logits_processors=[fail]), greedy(logits_processors=[lambda _, x: x])]
    outputs = engine.generate_batch_sync(prompts, params, errors="return")
    assert isinstance(outputs[1].error, ZeroDivisionError)
    assert outputs[1].output_token_ids == alone[1][:after]
    assert [outputs[0].output_token_ids, outputs[2].output_token_ids] == [alone[0], alone[2]]
    assert engine.generate_sync("one", greedy()).output_token_ids == alone[0]


def test_a_processor_that_exits_ends_its_own_row_only(engine: EngineCore) -> None:
    def leave(tokens: mx.array, logits: mx.array) -> mx.array:
        raise SystemExit(3)

    outputs = engine.generate_batch_sync(
        ["bad", "good"], [greedy(logits_processors=[leave]), greedy()], errors="return"
    )
    assert isinstance(outputs[0].error, RuntimeError)
    assert (outputs[1].error, outputs[1].completion_tokens) == (None, 8)


@pytest.mark.parametrize(
    "processor",
    [lambda _, logits: logits[:, :5], lambda _, logits: None, lambda _, logits: logits + mx.zeros((3, 1))],
    ids=["too narrow", "nothing", "too many rows"],
)
def test_a_processor_that_returns_nonsense_ends_its_own_row_only(engine: EngineCore, processor: Any) -> None:
    outputs = engine.generate_batch_sync(
        ["bad", "good"], [greedy(logits_processors=[processor]), greedy()], errors="return"
    )
    assert outputs[0].error is not None
    assert (outputs[1].error, outputs[1].completion_tokens) == (None, 8)


def test_a_processor_that_fails_after_the_last_token_spoils_nothing(engine: EngineCore) -> None:
    script = iter([50, 51, 52])

    def scripted(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == next(script), 0.0, -mx.inf)[None]

    output = engine.generate_sync("q", greedy(max_tokens=3, logits_processors=[scripted]))
    assert (output.output_token_ids, output.finish_reason) == ([50, 51, 52], "length")


# -- log-probabilities ----------------------------------------------------------------------------------


def reference_logprobs(prompt: list[int], output: list[int]) -> Array:
    model, _ = tiny()
    logits = model(mx.array([prompt + output]))[0, len(prompt) - 1 : -1]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.3, "seed": 1}, {"repetition_penalty": 1.5}])
def test_logprobs_are_the_models_own(engine: EngineCore, changes: dict[str, Any]) -> None:
    params = [greedy(logprobs=3, **{k: v for k, v in changes.items() if k != "temperature"})]
    params[0] = params[0].but(**changes)
    output = engine.generate_batch_sync(["a first prompt", "other"], [*params, greedy(temperature=1.0)])[0]
    prompt = engine.codec.encode("a first prompt")
    expected = reference_logprobs(prompt, output.output_token_ids)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.output_token_ids)
    for token, entry, row in zip(output.output_token_ids, output.logprobs, expected, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-3)
        best = np.argsort(-row)[:3]
        assert list(entry.top) == best.tolist()
        assert list(entry.top.values()) == pytest.approx(row[best].tolist(), abs=1e-3)


def test_logprobs_of_0_give_the_chosen_token_alone(engine: EngineCore) -> None:
    output = engine.generate_sync("q", greedy(logprobs=0))
    assert output.logprobs is not None
    assert [entry.top for entry in output.logprobs] == [{}] * 8


def test_logprobs_are_not_there_unless_asked_for(engine: EngineCore) -> None:
    assert engine.generate_sync("q", greedy()).logprobs is None
