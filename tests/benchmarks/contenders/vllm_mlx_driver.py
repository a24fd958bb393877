"""vllm-mlx, in an environment of its own: its AsyncEngineCore and its SimpleEngine.

The engine steps on the thread that loaded the model, which it is given: with the thread it would make itself, the
first hit of its prefix cache fails, and from then on it steps on the event loop's.
"""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_mlx import AsyncEngineCore, EngineConfig, SamplingParams, SchedulerConfig

from .. import subjects
from ..work import Answer, Ask
from .loop import Loop

logging.disable(logging.INFO)
SCHEDULER = ("prefill_step_size", "enable_prefix_cache", "cache_memory_mb")


class Engine(Loop):
    """`AsyncEngineCore`."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        self._worker = ThreadPoolExecutor(1)
        self._runner.run(self._start(folder, options))

    async def _start(self, folder: Path, options: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        model, tokenizer = await loop.run_in_executor(self._worker, subjects.load, folder)
        scheduler = SchedulerConfig(
            completion_batch_size=max(32, options.get("rows", 32)),
            **{key: options[key] for key in SCHEDULER if key in options},
        )
        config = EngineConfig(scheduler_config=scheduler)
        self.engine = AsyncEngineCore(model, tokenizer, config, generation_worker=self._worker)
        await self.engine.__aenter__()

    async def one(self, ask: Ask, answer: Answer, began: float) -> None:
        params = SamplingParams(max_tokens=ask.new, temperature=0)
        if not ask.streams:
            output = await self.engine.generate(ask.prompt.tokens, params)
            answer.ids, answer.text = list(output.output_token_ids), output.output_text
            answer.made, answer.end = len(answer.ids), time.perf_counter() - began
            return
        request = await self.engine.add_request(ask.prompt.tokens, params)
        answer.ids = []
        wait = None if ask.leaves is None else max(0.0, ask.leaves - (time.perf_counter() - began))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                async for output in self.engine.stream_outputs(request):
                    now = time.perf_counter() - began
                    answer.times += [now] * (output.completion_tokens - len(answer.times))
                    answer.ids, answer.text = list(output.output_token_ids), output.output_text
        answer.made, answer.end = len(answer.times), time.perf_counter() - began

    def close(self) -> None:
        self._runner.run(self.engine.stop())
        self._runner.close()
        self._worker.shutdown(wait=False)


class Simple(Loop):
    """`SimpleEngine`."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        self._runner.run(self._start(folder))

    async def _start(self, folder: Path) -> None:
        from vllm_mlx.engine.simple import SimpleEngine

        self.engine = SimpleEngine(str(folder))
        await self.engine.start()

    async def one(self, ask: Ask, answer: Answer, began: float) -> None:
        async for output in self.engine.stream_generate(ask.prompt.text, max_tokens=ask.new, temperature=0):
            now = time.perf_counter() - began
            answer.times += [now] * (output.completion_tokens - len(answer.times))
            answer.text = output.text
        answer.made, answer.end = len(answer.times), time.perf_counter() - began

    def close(self) -> None:
        self._runner.run(self.engine.stop())
        self._runner.close()
