"""A seeded request gives the same answer in any company."""

from typing import Any

import pytest

from mlx_nb import SamplingParams

COMPANY = [f"prompt number {n} " * n for n in range(1, 7)]


def hot(seed: int | None, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "temperature": 1.0, "top_p": 1.0, "seed": seed} | changes)


SHAPES = {
    "plain": {},
    "nucleus": {"top_p": 0.9},
    "candidates": {"top_k": 40},
    "floor": {"min_p": 0.05},
    "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "all": {"top_p": 0.95, "top_k": 50, "min_p": 0.01, "presence_penalty": 0.3, "logit_bias": {40: 2.0}},
}


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_gives_the_same_answer_alone_and_in_company(shape: str, seed: int, start: Any) -> None:
    params = hot(seed, **SHAPES[shape])
    alone = start("llama", enable_prefix_cache=False).generate_sync("Once upon", params)
    neighbours = [hot(None), hot(3, top_k=5), SamplingParams(max_tokens=20, temperature=0)] * 2
    outputs = start("llama").generate_batch_sync([*COMPANY, "Once upon"], [*neighbours, params])
    assert outputs[-1].output_token_ids == alone.output_token_ids


def test_a_seed_gives_the_same_answer_after_a_cache_hit_and_a_restart(start: Any) -> None:
    engine = start("qwen3_5")
    first = engine.generate_sync("Once upon", hot(0))
    assert engine.generate_sync("Once upon", hot(0)).output_token_ids == first.output_token_ids
    engine.stop_now()
    engine.launch()
    assert engine.generate_sync("Once upon", hot(0)).output_token_ids == first.output_token_ids


def test_different_seeds_give_different_answers(start: Any) -> None:
    outputs = start("llama").generate_batch_sync(["Once upon"] * 8, [hot(seed) for seed in range(8)])
    assert len({tuple(output.output_token_ids) for output in outputs}) == 8


def test_without_a_seed_each_request_draws_its_own(start: Any) -> None:
    outputs = start("llama").generate_batch_sync(["Once upon"] * 8, hot(None))
    assert len({tuple(output.output_token_ids) for output in outputs}) == 8


def test_equal_requests_with_one_seed_give_equal_answers(start: Any) -> None:
    outputs = start("llama").generate_batch_sync(["Once upon"] * 4, hot(5))
    assert len({tuple(output.output_token_ids) for output in outputs}) == 1
