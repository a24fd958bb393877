"""The demo model says the same, guessed at or not, and is called less often."""

from collections.abc import AsyncIterator
from typing import Any

import mlx_lm
import pytest

from mlx_nb import SimpleEngine

LENGTH = 48
TEXT = (
    "The lighthouse at Cape Morrow was built in 1868 of grey granite. Its lamp burned colza oil until 1904, "
    "and the keeper wound the clockwork every four hours."
)
MESSAGES = [{"role": "user", "content": f"Repeat this text word for word:\n\n{TEXT}"}]


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[SimpleEngine]:
    async with SimpleEngine("demo", **request.param) as started:
        yield started
    started.close()


async def answer(engine: SimpleEngine, load: Any) -> Any:
    """The engine's answer, once it is what mlx-lm says alone."""
    model, tokenizer = load("demo")
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    alone = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=LENGTH)
    expected = [response.token for response in alone if response.finish_reason != "stop"]
    output = await engine.generate(prompt, max_tokens=LENGTH, temperature=0)
    assert output.tokens == expected
    return output


@pytest.mark.parametrize("engine", [{"draft_kind": "prompt_lookup"}], indirect=True)
async def test_a_text_that_is_repeated_is_looked_up(engine: SimpleEngine, load: Any) -> None:
    output = await answer(engine, load)
    # What can be looked up begins a few words into the answer.
    assert output.mtp_accepted > 0.5 * output.completion_tokens
    assert engine.get_stats()["target"]["calls"] < 0.5 * output.completion_tokens


@pytest.mark.parametrize("engine", [{"draft_model": "demo", "num_draft_tokens": 3}], indirect=True)
async def test_drafting_for_itself_it_is_always_right(engine: SimpleEngine, load: Any) -> None:
    output = await answer(engine, load)
    assert output.mtp_accepted == output.mtp_drafts > 0
    stats = engine.get_stats()
    assert (stats["mtp"]["drafts"], stats["mtp"]["accepted"]) == (output.mtp_drafts, output.mtp_accepted)
    # The prompt, and then a call for every four tokens.
    assert stats["target"]["calls"] <= 3 + LENGTH / 4
