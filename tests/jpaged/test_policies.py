"""Scheduling and eviction policies: who is served first, who makes way, and how little a new one takes."""

import pytest
from test_scheduler import Loop, make_config, make_request

from jpaged.policies import FairShare, FirstComeFirstServed, PriorityFirst, RankedPolicy, make_policy
from jpaged.prefix_index import LeastRecentlyUsed, PrefixIndex, block_keys
from jpaged.scheduler import Scheduler


def run_in_order(policy, requests, config=None) -> list[str]:
    """Names in the order of their first admission, one at a time; the loop must end sound."""
    loop = Loop(config or make_config(max_num_seqs=1, async_scheduling=False))
    loop.scheduler.waiting = policy
    for request in requests:
        loop.scheduler.add(request)
    order = []
    while loop.scheduler.has_unfinished():
        loop.step()
        order += [each.request_id for plan in loop.plans[-1:] for each in plan.admit if each.request_id not in order]
    loop.run()
    return order


def test_priority_then_arrival():
    requests = [make_request(name, 4, 3) for name in "abcd"]
    for request, priority in zip(requests, (5, 1, 5, -2), strict=True):
        request.priority = priority
    assert run_in_order(PriorityFirst(), requests) == ["d", "b", "a", "c"]
    assert run_in_order(FirstComeFirstServed(), [make_request(name, 4, 3) for name in "abcd"]) == list("abcd")


def test_the_least_important_makes_way():
    loop = Loop(make_config(num_blocks=17, max_num_seqs=2, watermark=0.0))
    loop.scheduler.waiting = PriorityFirst()
    first, second = (make_request(name, 20, 30) for name in "ab")
    first.priority = 1
    for request in (first, second):
        loop.scheduler.add(request)
    loop.run()
    assert first.num_preemptions > 0 and second.num_preemptions == 0


def test_a_policy_of_one_method():
    class ShortestPromptFirst(RankedPolicy):
        def rank(self, request):
            return len(request.prompt_token_ids), request.arrival

    requests = [make_request(name, length, 3) for name, length in (("a", 9), ("b", 3), ("c", 30), ("d", 3))]
    assert run_in_order(ShortestPromptFirst(), requests) == ["b", "d", "a", "c"]
    with pytest.raises(NotImplementedError, match="RankedPolicy must define rank"):
        Scheduler(make_config(), RankedPolicy()).add(make_request("a"))


def test_fair_share_serves_tenants_by_what_they_had():
    """One tenant with many requests does not keep another waiting; weights count."""

    def order(weights=None):
        requests = [make_request(f"many{i}", 10, 5) for i in range(6)] + [
            make_request(f"few{i}", 10, 5) for i in range(3)
        ]
        for request in requests:
            request.tenant = request.request_id.rstrip("0123456789")
        return [name.rstrip("0123456789") for name in run_in_order(FairShare(weights), requests)]

    assert order()[:6] == ["many", "few"] * 3
    assert order({"many": 2.0}).index("few") == 1 and order({"many": 2.0})[:6].count("many") == 4
    with pytest.raises(ValueError, match="weight of tenant 'a' must be above 0, got 0"):
        FairShare({"a": 0})


def test_being_away_earns_no_credit():
    policy = FairShare()
    early, late = make_request("a"), make_request("b")
    early.tenant, late.tenant = "early", "late"
    policy.add(early)
    policy.served["early"] = 1000.0
    policy.add(late)
    assert policy.served["late"] == 1000.0


def test_unknown_policy():
    with pytest.raises(
        ValueError, match="scheduling_policy must be one of fcfs, priority, fair or an object, got 'lifo'"
    ):
        make_policy("lifo")
    assert isinstance(make_policy("fair"), FairShare)


def fill(index: PrefixIndex, root: bytes, blocks: int, priority: int = 0) -> list:
    chain = []
    for key in block_keys(root, list(range(4 * blocks)), 4):
        chain.append(index.add(key, chain[-1] if chain else None))
    index.unlock(chain, priority)
    return chain


def names_by_eviction(index: PrefixIndex) -> list[int]:
    return [index.evict()[0] for _ in range(index.reclaimable)]


def test_least_recently_used_goes_first_tail_before_head():
    index = PrefixIndex(100)
    old, new = fill(index, b"old", 3), fill(index, b"new", 2)
    index.lock(old[:1])
    index.unlock(old[:1])
    expected = [old[2], old[1], new[1], new[0], old[0]]
    names = [block.name for block in expected]
    assert names_by_eviction(index) == names


def test_what_counts_is_when_a_sequence_began_with_a_block():
    index = PrefixIndex(100)
    keys = {root: block_keys(root, list(range(8)), 4) for root in (b"long", b"short")}
    began = {root: index.tick() for root in keys}
    chains = {}
    for root in (b"short", b"long"):  # the one that began last ends first
        first = index.add(keys[root][0], None)
        chains[root] = [first, index.add(keys[root][1], first)]
        index.unlock(chains[root], used=began[root])
    expected = [block.name for block in (*reversed(chains[b"long"]), *reversed(chains[b"short"]))]
    assert names_by_eviction(index) == expected


def test_the_order_of_eviction_takes_no_memory_for_what_has_gone():
    index = PrefixIndex(100)
    chain = fill(index, b"a", 3)
    for _ in range(1000):
        index.touch(chain)
    assert len(index.policy.order) < 100 and len(index.policy.queues) == 1


def test_unimportant_blocks_go_first():
    index = PrefixIndex(100)
    important, other = fill(index, b"a", 2, priority=0), fill(index, b"b", 2, priority=3)
    expected = [block.name for block in (*reversed(other), *reversed(important))]
    assert names_by_eviction(index) == expected


def test_an_eviction_policy_that_knows_nothing_of_chains():
    """First in, first out would take heads before tails: the index takes the tail of the same chain."""

    class FirstInFirstOut:
        def __init__(self):
            self.blocks = {}

        def add(self, block):
            self.blocks[block.name] = block

        def remove(self, block):
            del self.blocks[block.name]

        def pick(self):
            return self.blocks[min(self.blocks)]

    index = PrefixIndex(100, FirstInFirstOut())
    chain = [block.name for block in fill(index, b"a", 3)]
    assert names_by_eviction(index) == chain[::-1]
    assert isinstance(PrefixIndex(9).policy, LeastRecentlyUsed)
    with pytest.raises(IndexError, match="every named block is locked"):
        index.evict()
