"""SimpleEngine against mlx-lm's single stream, and what each of its short cuts saves.

usage: python -m tests.benchmarks.simple_engine [MODEL] [ROUNDS]

All in one process and in turn: decoding against `mlx_lm.stream_generate`; time to the first token with a 1,000-token
system prompt that is new, and one that was seen; a prompt that is copied, with and without prompt lookup; SpecPrefill
of a 4,000-token prompt with the model as its own draft, where what is counted is the target's prefill. Prints JSON:
every round, medians and ratios. Exit status 1 when a bound is missed.
"""

import asyncio
import statistics
import sys
import time
from typing import Any

from mlx_nb.backends import cpu_blas

BLAS = cpu_blas.prepare()

import mlx_lm

from mlx_nb import SimpleEngine
from mlx_nb.backends import loader, sources

from .report import report

BOUNDS = {"stream": 0.97, "system_prompt": 8.0, "prompt_lookup": 1.5}
NEW = 64
TEXT = (
    "The lighthouse keeper wrote down every ship that passed: its name, its flag, the hour and the weather. "
    "On quiet evenings he read the lines aloud, and the cat by the stove listened. "
)
COPY = (
    "Write this text again, word for word:\n\n" + TEXT + "\n\nThe text again, word for word:\n\n" + TEXT[:30]
)


async def stream_speed(engine: SimpleEngine, prompt: list[int]) -> tuple[float, list[int]]:
    """Return tokens a second after the first, and the tokens."""
    first, tokens = 0.0, []
    async for output in engine.stream_generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True):
        first, tokens = first or time.perf_counter(), output.tokens
    return (NEW - 1) / (time.perf_counter() - first), tokens


def mlx_lm_speed(model: Any, tokenizer: Any, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the same of `mlx_lm.stream_generate`, which knows no ignore_eos: the prompt must not end by itself."""
    first, tokens = 0.0, []
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=NEW):
        first = first or time.perf_counter()
        tokens.append(response.token)
    return (len(tokens) - 1) / (time.perf_counter() - first), tokens


async def first_token(engine: SimpleEngine, system: str) -> float:
    """Return the seconds until the first token of an answer under a system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Hello {time.time_ns()}"}]
    began = time.perf_counter()
    async for output in engine.stream_chat(messages, max_tokens=1, temperature=0):
        if output.completion_tokens:
            break
    return time.perf_counter() - began


async def whole(engine: SimpleEngine, prompt: str) -> tuple[float, str]:
    """Return tokens a second, the prompt included, and the text."""
    began = time.perf_counter()
    output = await engine.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
    return output.completion_tokens / (time.perf_counter() - began - output.timings["ttft_s"]), output.text


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the median of first over second."""
    return round(statistics.median(one / two for one, two in pairs), 3)


async def run(name: str, rounds: int) -> dict[str, Any]:
    """Measure all of it."""
    path = sources.fetch(sources.resolve(name))
    loaded = loader.load(path)
    figures: dict[str, Any] = {}
    async with SimpleEngine(name) as engine:
        prompt = engine.tokenizer.encode(TEXT)
        pairs, equal = [], True
        for _ in range(rounds + 1):
            theirs, their_tokens = mlx_lm_speed(loaded.model, loaded.tokenizer, prompt)
            ours, our_tokens = await stream_speed(engine, prompt)
            pairs.append((ours, theirs))
            equal &= our_tokens == their_tokens
        pairs = pairs[1:]  # the first warms up
        figures["stream"] = {"tokens_per_s": pairs, "equal": equal, "ratio": ratio(pairs)}

        pairs = []
        for number in range(rounds):
            system = f"{number}. " + TEXT * 25
            pairs.append((await first_token(engine, system), await first_token(engine, system)))
        figures["system_prompt"] = {
            "tokens": len(engine.tokenizer.encode(system)),
            "ttft_s": pairs,
            "ratio": ratio(pairs),
        }
    async with (
        SimpleEngine(name, enable_cache=False) as plain,
        SimpleEngine(name, enable_cache=False, draft_kind="prompt_lookup", num_draft_tokens=8) as lookup,
    ):
        pairs, equal = [], True
        for _ in range(rounds):
            without, text = await whole(plain, COPY)
            with_it, same = await whole(lookup, COPY)
            pairs.append((with_it, without))
            equal &= text == same
        block = lookup.get_stats()["mtp"]
        figures["prompt_lookup"] = {
            "tokens_per_s": pairs,
            "equal": equal,
            "ratio": ratio(pairs),
            "counts": block,
        }
    async with SimpleEngine(
        name, enable_cache=False, specprefill_draft_model=name, specprefill_threshold=1000
    ) as engine:
        long = engine.tokenizer.encode(TEXT * 120)[:4000]
        full = await engine.generate(long, max_tokens=1, temperature=0)
        await engine.generate(long, max_tokens=1, temperature=0, specprefill=True)
        block = engine.get_stats()["specprefill"]
        figures["specprefill"] = {
            "full_ttft_s": full.timings["ttft_s"],
            "prefilled": block["kept"],
            "of": block["tokens"],
            "share": round(block["kept"] / block["tokens"], 3),
        }
    return figures


def main() -> int:
    """Run and report."""
    name = sys.argv[1] if len(sys.argv) > 1 else "demo"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    figures = asyncio.run(run(name, rounds))
    missed = [key for key, bound in BOUNDS.items() if figures[key]["ratio"] < bound]
    missed += [key for key in ("stream", "prompt_lookup") if not figures[key]["equal"]]
    report(model=name, blas=str(BLAS), bounds=BOUNDS, missed=missed, **figures)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
