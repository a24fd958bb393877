"""Keyword options of a request."""

import pytest

from mlx_nb import EngineCore, SamplingParams
from mlx_nb.backends.fake import fake_backend


@pytest.mark.parametrize("name", ["max_tokens", "bogus"])
async def test_an_unknown_option_is_refused_and_nothing_is_queued(name: str) -> None:
    core = EngineCore(None, None, backend=fake_backend())
    await core.start()
    try:
        for ask in (core.generate, core.add_request):
            with pytest.raises(
                TypeError, match=f"unknown option '{name}': known are priority, .* SamplingParams"
            ):
                await ask("x", SamplingParams(max_tokens=1), **{name: 5})
        with pytest.raises(TypeError, match=name):
            core.submit("x", **{name: 5})
        assert core.get_stats()["active_requests"] == 0
    finally:
        await core.stop()
