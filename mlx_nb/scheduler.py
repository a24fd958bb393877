"""Who runs next. Knows requests, lengths and limits; never touches a token's value or a tensor."""

from __future__ import annotations

import heapq
import itertools

from .config import SchedulerConfig
from .footprint import KVFootprint
from .request import Request

__all__ = ["Scheduler"]

RESERVE = 32
"""Tokens that every row must still be able to grow by when another one is admitted."""


class Scheduler:
    """Admits waiting requests in order, as slots, the prefill budget and memory allow.

    The order is arrival ("fcfs") or priority and then arrival. The head of the queue is never overtaken, so
    nothing starves: a prompt longer than the whole prefill budget is admitted as soon as no other is in prefill,
    and the first in line runs in any case once nothing else does. When running rows outgrow the memory, the
    youngest waits again, in its old place.

    Parameters
    ----------
    footprint : KVFootprint
    budget : int, optional
        Bytes for the caches of all rows; None means no bound.

    Attributes
    ----------
    paused : bool
        Start nothing new; what runs goes on, and what was preempted comes back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        footprint: KVFootprint | None = None,
        budget: int | None = None,
    ) -> None:
        self._config = config
        self._footprint = footprint or KVFootprint()
        self._budget = budget
        self._arrivals = itertools.count()
        self._queue: list[tuple[int, int, Request]] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._lengths: dict[str, int] = {}
        self._longest = 0  # of the running ones
        self._prefilling: dict[str, int] = {}
        self._preempted: set[str] = set()
        self.paused = False

    def __bool__(self) -> bool:
        """Whether there is anything to do now: while `paused`, what waits is left waiting."""
        return bool(self._running or self._preempted or (self._waiting and not self.paused))

    @property
    def running(self) -> list[str]:
        """Ids of the requests in prefill or decode, oldest admission first."""
        return list(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        rank = request.priority if self._config.policy == "priority" else 0
        self._places[request.request_id] = (rank, next(self._arrivals))
        self._lengths[request.request_id] = len(request.prompt_token_ids)
        self._wait(request)

    def schedule(self) -> list[Request]:
        """Requests to start now; they count as running from here on."""
        admitted = []
        while (request := self._head()) is not None and self._fits(request):
            if not self.paused:  # else it leaves the queue later, by no longer waiting
                heapq.heappop(self._queue)
            del self._waiting[request.request_id]
            self._preempted.discard(request.request_id)
            self._running[request.request_id] = request
            length = self._prefilling[request.request_id] = self._lengths[request.request_id]
            self._longest = max(self._longest, length)
            admitted.append(request)
        return admitted

    def preempt(self) -> list[Request]:
        """Running requests that must make room for the others' next tokens; they count as waiting again."""
        preempted = []
        while len(self._running) > 1 and not self._in_budget(len(self._running), self._longest + 1):
            youngest = max(self._running, key=self._places.__getitem__)
            request = self._running.pop(youngest)
            self._measure()
            self._prefilling.pop(youngest, None)
            self._preempted.add(youngest)
            self._wait(request)
            preempted.append(request)
        return preempted

    def prefilled(self, request_id: str, remaining: int) -> None:
        """Note how many tokens of a running request are still to be prefilled."""
        if request_id in self._prefilling:
            if remaining > 0:
                self._prefilling[request_id] = remaining
            else:
                del self._prefilling[request_id]

    def grew(self, request_id: str) -> None:
        """Note that a running request is one token longer."""
        length = self._lengths[request_id] = self._lengths[request_id] + 1
        self._longest = max(self._longest, length)

    def kv_bytes(self) -> int:
        """Bytes that the running rows take with their next tokens."""
        return self._footprint.bytes([self._longest + 1] * len(self._running))

    def remove(self, request_id: str) -> bool:
        """Forget a request; True if it was running. Unknown ids are ignored."""
        self._waiting.pop(request_id, None)
        self._prefilling.pop(request_id, None)
        self._places.pop(request_id, None)
        self._preempted.discard(request_id)
        ran = self._running.pop(request_id, None) is not None
        if self._lengths.pop(request_id, 0) == self._longest and ran:
            self._measure()
        return ran

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in [*self._waiting, *self._running]:
            self.remove(request_id)
        self._queue.clear()

    def _wait(self, request: Request) -> None:
        rank, arrival = self._places[request.request_id]
        heapq.heappush(self._queue, (rank, arrival, request))
        self._waiting[request.request_id] = request

    def _head(self) -> Request | None:
        if self.paused:
            first = min(self._preempted, key=self._places.__getitem__, default=None)
            return None if first is None else self._waiting[first]
        while self._queue:
            request = self._queue[0][2]
            if self._waiting.get(request.request_id) is request:
                return request
            heapq.heappop(self._queue)  # removed while it waited
        return None

    def _fits(self, request: Request) -> bool:
        if not self._running:
            return True
        if len(self._running) >= self._config.max_running:
            return False
        left = self._config.max_num_batched_tokens - sum(self._prefilling.values())
        if self._prefilling and self._lengths[request.request_id] > left:
            return False
        longest = max(self._longest, self._lengths[request.request_id])
        return self._in_budget(len(self._running) + 1, longest + RESERVE)

    def _in_budget(self, rows: int, longest: int) -> bool:
        return self._budget is None or self._footprint.bytes([longest] * rows) <= self._budget

    def _measure(self) -> None:
        self._longest = max((self._lengths[i] for i in self._running), default=0)
