"""This package's engines, used as a notebook would."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from mlx_nb import AsyncEngineCore, EngineConfig, SamplingParams, SchedulerConfig

from .. import subjects
from ..work import Answer, Ask
from .loop import Loop

SCHEDULER = ("prefill_step_size", "enable_prefix_cache", "cache_memory_mb")


def params(ask: Ask) -> SamplingParams:
    """Return greedy ones that never end early."""
    return SamplingParams(max_tokens=ask.new, temperature=0, ignore_eos=True)


class Ours(Loop):
    """`AsyncEngineCore`."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        scheduler = SchedulerConfig(
            completion_batch_size=max(32, options.get("rows", 32)),
            **{key: options[key] for key in SCHEDULER if key in options},
        )
        config = EngineConfig(scheduler_config=scheduler)
        if subjects.is_recipe(folder):
            self.engine = AsyncEngineCore(*subjects.load(folder), config)
        else:
            self.engine = AsyncEngineCore.from_pretrained(folder, config)
        self.engine.engine.launch()
        self.engine.engine.wait_ready()

    async def one(self, ask: Ask, answer: Answer, began: float) -> None:
        leaving = None
        if ask.streams:
            request = await self.engine.add_request(ask.prompt.tokens, params(ask))
            if ask.leaves is not None:
                wait = ask.leaves - (time.perf_counter() - began)
                leaving = asyncio.get_running_loop().call_later(wait, self.engine.engine.abort, request)
            async for output in self.engine.stream_outputs(request):
                answer.times += [time.perf_counter() - began] * len(output.new_token_ids)
        else:
            output = await self.engine.generate(ask.prompt.tokens, params(ask))
        answer.made, answer.end = output.completion_tokens, time.perf_counter() - began
        answer.ids, answer.text = output.output_token_ids, output.output_text
        if leaving is not None:
            leaving.cancel()

    def close(self) -> None:
        self.engine.close()
        self._runner.close()


class OursSimple(Loop):
    """`SimpleEngine`."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        from mlx_nb import SimpleEngine

        self.engine = SimpleEngine(
            str(folder), enable_cache=options.get("enable_prefix_cache", True), **_some(options)
        )
        self.engine.prepare_for_start()

    async def one(self, ask: Ask, answer: Answer, began: float) -> None:
        stream = self.engine.stream_generate(
            ask.prompt.tokens, max_tokens=ask.new, temperature=0, ignore_eos=True
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                count = output.completion_tokens - len(answer.times)
                answer.times += [time.perf_counter() - began] * count
        answer.made, answer.end = output.completion_tokens, time.perf_counter() - began
        answer.ids, answer.text = output.tokens, output.text

    def close(self) -> None:
        self.engine.close()
        self._runner.close()


def _some(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("prefill_step_size",) if key in options}
