"""Many requests with random arrivals, lengths, aborts and faults: all end rightly, and memory stays flat.

usage: python tests/benchmarks/soak.py [REQUESTS] [SEED]

Prints JSON: how requests ended, memory in the two halves, CPU time of the idle engine. Exit status 1 when a
request ended wrongly, memory grew, or the idle engine worked.
"""

import asyncio
import random
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlx_nb.backends import cpu_blas

cpu_blas.prepare()

from benchmarks.report import report
from models import tiny

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig

CONCURRENT = 48
IDLE_S = 5.0
HUNG_S = 120.0


class PlannedFault(Exception):
    """Raised by a logits processor that is meant to fail."""


def failing(after: int) -> Any:
    """Return a logits processor that raises at its `after`-th token."""
    calls = 0

    def process(tokens: Any, logits: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise PlannedFault
        return logits

    return process


async def whole(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    return (await engine.generate(prompt, params)).completion_tokens == params.max_tokens


async def batch(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    outputs = await asyncio.to_thread(engine.generate_batch_sync, [prompt, prompt[:3]], params)
    return [output.completion_tokens for output in outputs] == [params.max_tokens] * 2


async def fault(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    processor = failing(dice.randrange(30))
    try:
        await engine.generate(prompt, params.but(max_tokens=40, logits_processors=[processor]))
    except PlannedFault:
        return True
    return False


async def cancel(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    task = asyncio.create_task(engine.generate(prompt, params.but(max_tokens=2000)))
    await asyncio.sleep(dice.random() * 0.2)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def timeout(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    try:
        await engine.generate(prompt, params.but(max_tokens=3000), timeout=dice.random() * 0.3)
    except TimeoutError:
        return True
    return False


async def abort(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    request = await engine.add_request(prompt, params.but(max_tokens=2000))
    await asyncio.sleep(dice.random() * 0.2)
    await engine.abort_request(request)
    return [output async for output in engine.stream_outputs(request)][-1].finish_reason == "abort"


async def leave(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    async for output in engine.stream_outputs(await engine.add_request(prompt, params)):
        return not output.error
    return False


async def stream(engine: EngineCore, dice: random.Random, prompt: list[int], params: SamplingParams) -> bool:
    request = await engine.add_request(prompt, params)
    outputs = [output async for output in engine.stream_outputs(request)]
    joined = "".join(output.new_text for output in outputs)
    return joined == outputs[-1].output_text and outputs[-1].finish_reason == "length"


WAYS = (whole, whole, batch, fault, cancel, timeout, abort, leave, stream)


async def one(engine: EngineCore, dice: random.Random) -> str:
    """Run one request in one of the ways; its name, with "wrong" before it if it ended otherwise than it should."""
    await asyncio.sleep(dice.expovariate(20))
    prompt = [dice.randrange(16, 280) for _ in range(dice.choice([1, 5, 20, 80, 300]))]
    params = SamplingParams(
        max_tokens=dice.randrange(1, 40),
        temperature=dice.choice([0.0, 0.8]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.2]),
        ignore_eos=True,
    )
    way = dice.choice(WAYS)
    try:
        right = await asyncio.wait_for(way(engine, dice, prompt, params), HUNG_S)
    except TimeoutError:
        return f"wrong: {way.__name__} hung"
    return way.__name__ if right else f"wrong: {way.__name__}"


async def soak(engine: EngineCore, count: int, dice: random.Random) -> tuple[Counter[str], list[float]]:
    """Run all requests, at most CONCURRENT at once; how they ended, and MiB held along the way."""
    ends: Counter[str] = Counter()
    memory: list[float] = []
    gate = asyncio.Semaphore(CONCURRENT)

    async def gated(number: int) -> None:
        async with gate:
            ends[await one(engine, random.Random(dice.random()))] += 1
            if number % 20 == 0:
                memory.append(resident_mib())

    await asyncio.gather(*(gated(number) for number in range(count)))
    return ends, memory


def resident_mib() -> float:
    """Return what the process holds, or its peak where the system doesn't say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def main(count: int = 2000, seed: int = 0) -> int:
    """Soak, report, and say by the exit status whether all was well."""
    scheduler = SchedulerConfig(completion_batch_size=16, cache_memory_mb=16)
    engine = EngineCore(*tiny("llama"), EngineConfig(scheduler_config=scheduler))
    began = time.monotonic()

    async def run() -> tuple[Counter[str], list[float]]:
        await engine.start()
        return await soak(engine, count, random.Random(seed))

    ends, memory = asyncio.run(run())
    seconds = time.monotonic() - began
    stats = engine.get_stats()
    cpu = time.process_time()
    time.sleep(IDLE_S)
    idle_cpu = time.process_time() - cpu
    engine.close()

    half = len(memory) // 2
    first, second = (
        sum(part) / len(part) for part in (memory[half : half + half // 2], memory[half + half // 2 :])
    )
    wrong = {end: n for end, n in ends.items() if end.startswith("wrong")}
    problems = [
        *(f"{n} x {end}" for end, n in wrong.items()),
        *(["requests are left"] if stats["active_requests"] else []),
        *(
            [f"memory grew from {first:.0f} to {second:.0f} MiB in the second half"]
            if second > 1.03 * first
            else []
        ),
        *(
            [f"idle engine used {idle_cpu:.2f} s of CPU in {IDLE_S:.0f} s"]
            if idle_cpu > 0.05 * IDLE_S
            else []
        ),
        *([f"threads left: {names}"] if (names := engine_threads()) else []),
    ]
    report(
        requests=count,
        seconds=round(seconds, 1),
        ends=dict(sorted(ends.items())),
        completion_tokens=stats["total_completion_tokens"],
        prefix_cache=stats["prefix_cache"],
        third_quarter_mib=round(first, 1),
        last_quarter_mib=round(second, 1),
        idle_cpu_share=round(idle_cpu / IDLE_S, 4),
        problems=problems,
    )
    return 1 if problems else 0


def engine_threads() -> list[str]:
    """Return the engine threads that still live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mlx")]


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
