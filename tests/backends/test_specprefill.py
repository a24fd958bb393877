"""Sparse prefill against a slow reading of the paper, and against a full prefill where it must be the same."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models import tiny

from mlx_nb import EngineConfig, EngineCore, ModelLoadError, RequestError, SamplingParams, SchedulerConfig
from mlx_nb.backends.loader import evaluate
from mlx_nb.backends.single import SingleBackend
from mlx_nb.backends.specprefill import CHUNK, LOOKAHEAD, POOL, Scoring, choose, require_scorer
from mlx_nb.config import SparsePrefill

FAMILIES = ["llama", "qwen3", "qwen3_5"]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


@pytest.fixture
def engine() -> Iterator[Any]:
    engines: list[EngineCore] = []

    def start(family: str, scorer: str | None = "llama", **scheduler: Any) -> EngineCore:
        model, tokenizer = tiny(family)
        draft = tiny(scorer, seed=3)[0] if scorer else None
        evaluate(model)
        made: list[SingleBackend] = []

        def make(config: EngineConfig, _: Any) -> SingleBackend:
            made.append(SingleBackend(model, tokenizer, config, scorer=draft))
            return made[0]

        config = EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=1, **scheduler))
        engine = EngineCore(None, None, config, backend=make)
        engines.append(engine)
        engine.launch()
        engine.wait_ready()
        return engine

    yield start
    for each in engines:
        each.close()


def reference_scores(model: Any, tokens: list[int]) -> np.ndarray:
    """The paper's importance, from whole attention matrices: no cache, no shared code."""
    said = list(tokens)
    for _ in range(LOOKAHEAD - 1):
        said.append(int(mx.argmax(model(mx.array([said]))[0, -1]).item()))
    inner, hidden = model.model, model.model.embed_tokens(mx.array([said]))
    best = np.zeros((LOOKAHEAD, len(tokens) - 1))
    future = mx.triu(mx.full((len(said), len(said)), -mx.inf), k=1)
    for layer in inner.layers:
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        heads, groups = attention.n_heads, attention.n_kv_heads

        def split(projected: mx.array, count: int) -> mx.array:
            return projected.reshape(1, len(said), count, -1).transpose(0, 2, 1, 3)

        q, k, v = (
            split(attention.q_proj(x), heads), split(attention.k_proj(x), groups), split(attention.v_proj(x), groups),
        )  # fmt: skip
        q, k = attention.rope(q), attention.rope(k)
        k, v = (mx.repeat(each, heads // groups, axis=1) for each in (k, v))
        weights = mx.softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1]) + future, axis=-1)
        rows = np.array(weights[0, :, len(tokens) - 1 :, : len(tokens) - 1])
        best = np.maximum(best, rows.max(axis=0))
        out = (weights @ v).transpose(0, 2, 1, 3).reshape(1, len(said), -1)
        hidden = hidden + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return best.mean(axis=0)


def reference_choice(scores: np.ndarray, keep: float, backbone: float) -> list[int]:
    """The tokens kept, by the slow road."""
    half = POOL // 2
    smooth = [np.mean(scores[max(0, i - half) : i + half + 1]) for i in range(len(scores))]
    chunks = [list(range(i, min(i + CHUNK, len(scores)))) for i in range(0, len(scores), CHUNK)]
    wanted = max(1, math.ceil(round(keep * len(chunks), 6)))
    kept = {len(chunks) - 1}
    spread = min(wanted, math.floor(round(backbone * len(chunks), 6)))
    for i in range(spread):
        kept.add(i * len(chunks) // spread)
    ranked = sorted(range(len(chunks)), key=lambda i: (-np.mean([smooth[t] for t in chunks[i]]), i))
    for i in ranked:
        if len(kept) >= wanted:
            break
        kept.add(i)
    return [token for i in sorted(kept) for token in chunks[i]]


def test_importance_is_the_paper_s() -> None:
    model, _ = tiny("llama", seed=3)
    require_scorer(model)
    tokens = prompt(150)
    scoring = Scoring(model, tokens)
    while scoring.feed(40):
        pass
    assert np.allclose(scoring.scores(), reference_scores(model, tokens), atol=1e-5)


@pytest.mark.parametrize(("keep", "backbone"), [(0.3, 0.0), (0.3, 0.1), (0.1, 0.1), (1.0, 0.0), (0.01, 0.0)])
def test_the_chunks_of_4000_tokens_are_those_of_the_reference(keep: float, backbone: float) -> None:
    scores = np.random.default_rng(1).random(3999) ** 8
    runs = choose(scores.tolist(), keep, backbone)
    assert [t for begin, end in runs for t in range(begin, end)] == reference_choice(scores, keep, backbone)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(runs))


def test_the_chunks_a_draft_model_chooses_of_a_long_prompt_are_those_of_the_reference() -> None:
    model, _ = tiny("llama", seed=3)
    require_scorer(model)
    tokens = prompt(1500, seed=5)
    scoring = Scoring(model, tokens)
    while scoring.feed(512):
        pass
    runs = choose(scoring.scores(), 0.3)
    kept = reference_choice(reference_scores(model, tokens), 0.3, 0.0)
    assert [t for begin, end in runs for t in range(begin, end)] == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_all_is_a_full_prefill(family: str, engine: Any) -> None:
    running = engine(family, enable_prefix_cache=False)
    tokens = prompt(300)
    full = running.generate_sync(tokens, GREEDY)
    sparse = running.generate_sync(tokens, GREEDY, sparse_prefill=SparsePrefill(threshold=100, keep_pct=1.0))
    assert sparse.output_token_ids == full.output_token_ids
    assert running.get_stats()["specprefill"]["kept"] == 299


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_stands_at_its_true_position(family: str, engine: Any) -> None:
    running = engine(family, enable_prefix_cache=False)
    model, _ = tiny(family)
    tokens = prompt(400, seed=2)
    seen: list[Any] = []
    worker = running._worker
    step = worker.backend.next

    def look() -> Any:
        events = step()
        stream = worker.backend._stream
        if stream is not None and stream.runs == [] and not seen:
            cache = next(c for c in stream.state if hasattr(c, "held"))
            seen.append((cache.held, cache.offset, np.array(cache.keys[..., : cache.held, :])))
        return events

    worker.backend.next = look
    running.generate_sync(tokens, GREEDY, sparse_prefill=SparsePrefill(threshold=100, keep_pct=0.3))
    held, position, keys = seen[0]

    draft, _ = tiny("llama", seed=3)
    scoring = Scoring(draft, tokens)
    while scoring.feed(512):
        pass
    kept = [t for begin, end in choose(scoring.scores(), 0.3) for t in range(begin, end)]
    assert position == 399
    assert held == len(kept) == running.get_stats()["specprefill"]["kept"]
    if (
        family != "qwen3_5"
    ):  # there the first attention follows recurrent layers, which have seen other tokens
        state = make_prompt_cache(model)
        model(mx.array([tokens[:-1]]), cache=state)
        assert np.allclose(keys, np.array(state[0].keys)[..., kept, :], atol=1e-5)


def test_decoding_goes_on_at_the_right_position(engine: Any) -> None:
    """Against a forward pass over the kept tokens that rotates each by its true position."""
    running = engine("llama", enable_prefix_cache=False)
    model, _ = tiny("llama")
    tokens = prompt(400, seed=2)
    output = running.generate_sync(
        tokens, GREEDY.but(max_tokens=3), sparse_prefill=SparsePrefill(threshold=100, keep_pct=0.3)
    )
    draft, _ = tiny("llama", seed=3)
    scoring = Scoring(draft, tokens)
    while scoring.feed(512):
        pass
    places = [t for begin, end in choose(scoring.scores(), 0.3) for t in range(begin, end)] + [399]
    said: list[int] = []
    for _ in range(3):
        said.append(_next_at(model, [tokens[p] for p in places[: len(places) - len(said)]] + said, places))
        places.append(places[-1] + 1)
    assert output.output_token_ids == said


def _next_at(model: Any, tokens: list[int], places: list[int]) -> int:
    hidden = model.model.embed_tokens(mx.array([tokens]))
    positions, count = mx.array(places), len(tokens)
    future = mx.triu(mx.full((count, count), -mx.inf), k=1)

    def rotated(rope: Any, x: mx.array) -> mx.array:  # each token as a batch row with an offset of its own
        return rope(x.transpose(2, 1, 0, 3), offset=positions).transpose(2, 1, 0, 3)

    for layer in model.model.layers:
        a, x = layer.self_attn, layer.input_layernorm(hidden)
        q, k, v = (
            each.reshape(1, count, n, -1).transpose(0, 2, 1, 3)
            for each, n in (
                (a.q_proj(x), a.n_heads),
                (a.k_proj(x), a.n_kv_heads),
                (a.v_proj(x), a.n_kv_heads),
            )
        )
        q, k = rotated(a.rope, q), rotated(a.rope, k)
        k, v = (mx.repeat(each, a.n_heads // a.n_kv_heads, axis=1) for each in (k, v))
        w = mx.softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1]) + future, axis=-1)
        hidden = hidden + a.o_proj((w @ v).transpose(0, 2, 1, 3).reshape(1, count, -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    hidden = model.model.norm(hidden)
    head = model.model.embed_tokens.as_linear if model.args.tie_word_embeddings else model.lm_head
    return int(mx.argmax(head(hidden)[0, -1]).item())


def test_a_short_prompt_is_prefilled_in_full(engine: Any) -> None:
    running = engine("llama")
    running.generate_sync(prompt(99), GREEDY, sparse_prefill=SparsePrefill(threshold=100))
    assert running.get_stats()["specprefill"]["requests"] == 0


def test_the_stored_prefix_does_not_count_and_a_sparse_state_is_not_stored(engine: Any) -> None:
    running = engine("llama")
    tokens = prompt(300)
    running.generate_sync(tokens[:200], GREEDY)
    sparse = SparsePrefill(threshold=120, keep_pct=0.5)
    running.generate_sync(tokens, GREEDY, sparse_prefill=sparse)
    assert running.get_stats()["specprefill"]["requests"] == 0  # 100 were left
    entries = running.get_cache_stats()["entry_count"]
    running.generate_sync(prompt(300, seed=9), GREEDY, sparse_prefill=sparse)
    assert running.get_stats()["specprefill"]["requests"] == 1
    assert running.get_cache_stats()["entry_count"] == entries


def test_a_failing_draft_falls_back_to_a_full_prefill_and_says_so(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = engine("llama", enable_prefix_cache=False)
    tokens = prompt(300)
    full = running.generate_sync(tokens, GREEDY)

    def broken(_: Scoring) -> list[float]:
        raise RuntimeError("no attention today")

    monkeypatch.setattr(Scoring, "scores", broken)
    output = running.generate_sync(tokens, GREEDY, sparse_prefill=SparsePrefill(threshold=100))
    assert output.output_token_ids == full.output_token_ids
    assert running.get_stats()["specprefill"]["fallbacks"] == 1
    assert "no attention today" in running.get_stats()["specprefill"]["last_error"]
    assert "the whole prompt is prefilled" in caplog.text


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mamba2"])
def test_a_target_without_plain_attention_is_refused(family: str, engine: Any) -> None:
    with pytest.raises(ModelLoadError, match="SpecPrefill needs plain attention"):
        engine(family)


def test_a_draft_without_attention_is_refused(engine: Any) -> None:
    with pytest.raises(ModelLoadError, match="can't see this draft model's attention"):
        engine("llama", scorer="mamba2")


def test_without_a_draft_model_a_request_for_it_is_refused(engine: Any) -> None:
    with pytest.raises(RequestError, match="no draft model for SpecPrefill"):
        engine("llama", scorer=None).submit([1, 2, 3], GREEDY, sparse_prefill=SparsePrefill())
