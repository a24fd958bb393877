"""Who runs next. Knows requests and limits; never touches a token's value or a tensor."""

from __future__ import annotations

import heapq
import itertools

from .config import SchedulerConfig
from .request import Request

__all__ = ["Scheduler"]


class Scheduler:
    """Admits waiting requests in order, as slots and the prefill budget allow.

    The order is arrival ("fcfs") or priority and then arrival. The head of the queue is never overtaken, so
    nothing starves: a prompt longer than the whole budget is admitted as soon as no other is in prefill.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._queue: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._prefilling: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in prefill or decode."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        rank = request.priority if self._config.policy == "priority" else 0
        heapq.heappush(self._queue, (rank, next(self._arrivals), request))
        self._waiting[request.request_id] = request

    def schedule(self) -> list[Request]:
        """Requests to start now; they count as running from here on."""
        admitted = []
        while (request := self._head()) is not None and self._fits(request):
            heapq.heappop(self._queue)
            del self._waiting[request.request_id]
            self._running[request.request_id] = request
            self._prefilling[request.request_id] = len(request.prompt_token_ids)
            admitted.append(request)
        return admitted

    def prefilled(self, request_id: str, remaining: int) -> None:
        """Note how many prompt tokens of a running request are still to be prefilled."""
        if request_id in self._prefilling:
            if remaining > 0:
                self._prefilling[request_id] = remaining
            else:
                del self._prefilling[request_id]

    def remove(self, request_id: str) -> bool:
        """Forget a request; True if it was running. Unknown ids are ignored."""
        self._waiting.pop(request_id, None)
        self._prefilling.pop(request_id, None)
        return self._running.pop(request_id, None) is not None

    def clear(self) -> None:
        """Forget all requests."""
        self._queue.clear()
        self._waiting.clear()
        self._running.clear()
        self._prefilling.clear()

    def _head(self) -> Request | None:
        while self._queue:
            request = self._queue[0][2]
            if self._waiting.get(request.request_id) is request:
                return request
            heapq.heappop(self._queue)  # removed while it waited
        return None

    def _fits(self, request: Request) -> bool:
        if len(self._running) >= self._config.max_running:
            return False
        budget = self._config.max_num_batched_tokens - sum(self._prefilling.values())
        return not self._prefilling or len(request.prompt_token_ids) <= budget
