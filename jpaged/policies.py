"""Who is served first, and who makes way: scheduling policies as small classes. Imports no JAX.

A policy holds the requests that wait. To try another order, write a class with one method and hand it over:

    class ShortestPromptFirst(RankedPolicy):
        def rank(self, request):
            return len(request.prompt_token_ids), request.arrival

    LLM(model, scheduling_policy=ShortestPromptFirst())

`request.arrival` counts requests as they come; a preempted one keeps its number, so that it goes before all who came
later. The scheduler admits the first of the order as soon as it fits, and never another before it; where memory runs
out, the last of the order that runs is preempted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jpaged.request import Request

if TYPE_CHECKING:
    from jpaged.schedule import Schedule


class SchedulingPolicy(Protocol):
    """The requests that wait, in the order in which they are to run. Nothing may cost more than O(log n)."""

    def add(self, request: Request) -> None:
        """A request comes, or comes back because it was preempted."""

    def remove(self, request: Request) -> None:
        """A waiting request was admitted or aborted."""

    def first(self) -> Request | None:
        """The next to admit, None if nobody waits."""

    def last(self, running: Iterable[Request]) -> Request:
        """The one of the running that makes way."""

    def charge(self, plan: Schedule, generated: np.ndarray) -> None:
        """A step was read: the chunks of `plan.prefill` were computed, `plan.decode` got `generated` i64[D] tokens."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All who wait, the first of them first or nearly so: for estimates."""


class RankedPolicy:
    """An order by `rank`, the smallest first, fixed while a request waits."""

    def __init__(self) -> None:
        self.heap: list[tuple[Any, int, Request]] = []
        self.waiting: dict[Request, int] = {}  # -> number of its entry; entries of others are dead
        self.entries = 0

    def rank(self, request: Request) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define rank(request)")

    def add(self, request: Request) -> None:
        self.entries += 1
        self.waiting[request] = self.entries
        heapq.heappush(self.heap, (self.rank(request), self.entries, request))

    def remove(self, request: Request) -> None:
        del self.waiting[request]

    def first(self) -> Request | None:
        while self.heap and self._is_dead(self.heap[0]):
            heapq.heappop(self.heap)
        return self.heap[0][2] if self.heap else None

    def last(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.rank)

    def charge(self, plan: Schedule, generated: np.ndarray) -> None:
        pass

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in self.heap if not self._is_dead(entry))

    def _is_dead(self, entry: tuple[Any, int, Request]) -> bool:
        return self.waiting.get(entry[2]) != entry[1]


class FirstComeFirstServed(RankedPolicy):
    """In order of arrival."""

    def rank(self, request: Request) -> tuple[int, int]:
        return request.arrival, request.index


class PriorityFirst(RankedPolicy):
    """Lower `priority` numbers first, equals in order of arrival. High numbers may wait for ever."""

    def rank(self, request: Request) -> tuple[int, int, int]:
        return request.priority, request.arrival, request.index


class FairShare:
    """The tenant that was served the fewest tokens is next; a tenant's own requests in order of arrival.

    Tokens computed and generated count alike, divided by the tenant's weight. A tenant of whom nobody waited starts
    level with the least served of those that wait: being away earns no credit (the virtual token counter of Sheng et
    al., "Fairness in Serving Large Language Models", 2024).
    """

    def __init__(self, weights: dict[str | None, float] | None = None) -> None:
        self.weights = weights or {}
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"the weight of tenant {tenant!r} must be above 0, got {weight!r}")
        self.queues: dict[str | None, FirstComeFirstServed] = {}
        self.served: dict[str | None, float] = {}

    def add(self, request: Request) -> None:
        tenant = request.tenant
        queue = self.queues.setdefault(tenant, FirstComeFirstServed())
        if not queue:
            level = min((self.served[other] for other, others in self.queues.items() if others), default=0.0)
            self.served[tenant] = max(self.served.get(tenant, 0.0), level)
        queue.add(request)

    def remove(self, request: Request) -> None:
        self.queues[request.tenant].remove(request)

    def first(self) -> Request | None:
        waiting = [tenant for tenant, queue in self.queues.items() if queue]
        return self.queues[min(waiting, key=self.served.__getitem__)].first() if waiting else None

    def last(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: (self.served[request.tenant], request.arrival, request.index))

    def charge(self, plan: Schedule, generated: np.ndarray) -> None:
        for request, tokens in zip(plan.decode, generated.tolist(), strict=True):
            self._serve(request.tenant, tokens)
        for chunk in plan.prefill:
            self._serve(chunk.request.tenant, chunk.length + chunk.last)

    def _serve(self, tenant: str | None, tokens: int) -> None:
        self.served[tenant] += tokens / self.weights.get(tenant, 1.0)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self.queues.values() for request in queue)


POLICIES = {"fcfs": FirstComeFirstServed, "priority": PriorityFirst, "fair": FairShare}


def make_policy(policy: str | SchedulingPolicy) -> SchedulingPolicy:
    """A policy by name, or the one given. ValueError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"scheduling_policy must be one of {', '.join(POLICIES)} or an object, got {policy!r}")
    return POLICIES[policy]()
