"""A stand-in engine whose numbers move by the clock: no thread and no model; requests can be aborted."""

import time
from dataclasses import dataclass, field
from typing import Any

TOKENS_PER_SECOND = 50.0


@dataclass(frozen=True)
class Info:
    precision: str
    backend: str


@dataclass
class _Request:
    request_id: str
    prompt: str
    max_tokens: int
    started: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        return min(self.max_tokens, int((time.monotonic() - self.started) * TOKENS_PER_SECOND))


class MovingEngine:
    """What the monitor may ask for, and a record of what it asked."""

    model_name = "moving"

    def __init__(self) -> None:
        self.info = Info("float32", "no back end")
        self.state = "running"
        self.failure: BaseException | None = None
        self.calls: list[tuple[str, ...]] = []
        self.times: list[float] = []
        self.reads = 0
        self._live: dict[str, _Request] = {}
        self._finished = 0
        self.paused, self.loaded = False, True
        self.slots, self.kv = 8, 110_000_000

    def submit(self, prompt: str, max_tokens: int = 100_000, request_id: str | None = None) -> str:
        request_id = request_id or f"r{len(self._live) + self._finished}"
        self._live[request_id] = _Request(request_id, prompt, max_tokens)
        return request_id

    def get_stats(self) -> dict[str, Any]:
        self.reads += 1
        rows = list(self._live.values())
        return {
            "num_running": len(rows),
            "num_waiting": 0,
            "num_requests_processed": self._finished,
            "generation_tps": TOKENS_PER_SECOND * len(rows),
            "prompt_tps": 0.0,
            "max_running": self.slots,
            "paused": self.paused,
            "loaded": self.loaded,
            "memory": {
                "active": 700_000_000,
                "cache": 90_000_000,
                "peak": 900_000_000,
                "limit": 4_000_000_000,
                "weights": 540_000_000,
                "kv": self.kv if rows else 0,
                "prefix": 50_000_000,
            },
            "requests": [
                {
                    "request_id": row.request_id,
                    "phase": "decode",
                    "prompt_tokens": len(row.prompt.split()),
                    "completion_tokens": row.done,
                    "max_tokens": row.max_tokens,
                    "progress": row.done / row.max_tokens,
                    "elapsed_s": time.monotonic() - row.started,
                    "tokens_per_second": TOKENS_PER_SECOND,
                    "cached_tokens": 0,
                    "prompt_preview": row.prompt,
                }
                for row in rows
            ],
        }

    def get_cache_stats(self) -> dict[str, Any] | None:
        return {"hits": 3, "misses": 1, "entry_count": 2, "tokens_saved": 640}

    def abort(self, request_id: str) -> bool:
        self._called("abort", request_id)
        gone = self._live.pop(request_id, None)
        self._finished += gone is not None
        return gone is not None

    def abort_all(self) -> int:
        self._called("abort_all")
        count = len(self._live)
        self._live.clear()
        self._finished += count
        return count

    def clear_prefix_cache_soon(self) -> None:
        self._called("clear_prefix_cache_soon")

    def pause(self) -> None:
        self._called("pause")
        self.paused = True

    def resume(self) -> None:
        self._called("resume")
        self.paused = False

    def restart_soon(self) -> None:
        self._called("restart_soon")
        self.state, self.failure, self.paused = "running", None, False

    def stop_soon(self) -> None:
        self._called("stop_soon")
        self._live.clear()
        self.state = "stopped"

    def _called(self, *call: str) -> None:
        self.calls.append(call)
        self.times.append(time.time())
