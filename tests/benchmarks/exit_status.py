"""Whether a process that used the engine exits with status 0, many times over; run by hand.

Usage: python tests/benchmarks/exit_status.py [MODEL] [TIMES]
"""

import asyncio
import subprocess
import sys
from collections import Counter


async def use(model: str) -> None:
    from mlx_nb import AsyncEngineCore, SamplingParams

    engine = AsyncEngineCore.from_pretrained(model)
    engine.start()
    await engine.generate("Hello", SamplingParams(max_tokens=3))
    await engine.add_request("Hello", SamplingParams(max_tokens=500))  # still running at exit


def main(model: str = "demo", times: str = "20") -> int:
    statuses: Counter[int | str] = Counter()
    for _ in range(int(times)):
        command = [sys.executable, __file__, "--once", model]
        try:
            statuses[subprocess.run(command, check=False, timeout=120).returncode] += 1
        except subprocess.TimeoutExpired:
            statuses["hung"] += 1
    print(f"{statuses[0]} of {times} exited with status 0; all: {dict(statuses)}")
    return 0 if set(statuses) == {0} else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        asyncio.run(use(sys.argv[2]))
    else:
        sys.exit(main(*sys.argv[1:]))
