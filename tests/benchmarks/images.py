"""What a picture costs: time to the first token, cold, seen before, and asked about again.

usage: python -m tests.benchmarks.images MODEL [ROUNDS] [SIDE]

One prompt with one picture of SIDE x SIDE pixels (448 unless it is said), in an engine that does nothing else. Cold:
a picture never seen. Seen: the same picture behind another text, so that its features are known and its KV state is
not. Again: another question about it, behind the same text. Prints JSON: every round in seconds, medians, and how
many times faster than cold.
"""

import statistics
import sys
import time
from typing import Any

from mlx_nb.backends import cpu_blas

BLAS = cpu_blas.prepare()

import numpy as np
from PIL import Image

from mlx_nb import EngineCore, SamplingParams
from mlx_nb.backends.pretrained import Pretrained
from mlx_nb.prompts.chat import chat_tokens

from .report import report


def picture(number: int, side: int) -> Image.Image:
    """Return one of many."""
    pixels = np.random.default_rng(number).integers(0, 255, (side // 7, side // 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)


def first_token(engine: EngineCore, image: Image.Image, before: str, question: str) -> float:
    """Return the seconds from the request to its first token, the processor's work included."""
    parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": question}]
    began = time.perf_counter()
    tokens = chat_tokens(engine.codec, [{"role": "user", "content": parts}])
    engine.generate_sync(tokens, SamplingParams(max_tokens=1, temperature=0), images=[image])
    return time.perf_counter() - began


def main(model: str, rounds: int = 5, side: int = 448) -> None:
    """Measure and print."""
    engine = EngineCore(None, None, backend=Pretrained(model))
    engine.launch()
    engine.wait_ready()
    took: dict[str, list[float]] = {"cold": [], "seen": [], "again": []}
    try:
        first_token(engine, picture(0, side), "Warm.", "Up?")
        for number in range(1, rounds + 1):
            image = picture(number, side)
            took["cold"].append(first_token(engine, image, f"Picture {number}.", "What is it?"))
            took["seen"].append(first_token(engine, image, f"Once more, {number}.", "What is it?"))
            took["again"].append(first_token(engine, image, f"Picture {number}.", "Which colours has it?"))
        stats: Any = engine.get_cache_stats()
    finally:
        engine.close()
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    report(
        model=model,
        side=side,
        blas=BLAS.status,
        seconds=took,
        medians=medians,
        faster={name: medians["cold"] / medians[name] for name in ("seen", "again")},
        vision={name: value for name, value in stats.items() if name.startswith("vision")},
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
