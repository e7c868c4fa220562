"""The index of named blocks on its own: keys, locks, pins, eviction. No JAX."""

import random

import pytest

from jpaged.prefix_index import PrefixIndex, block_key, block_keys, root_key


def grow(index: PrefixIndex, keys: list[bytes]) -> list:
    """A chain that is locked by whoever adds it; blocks that are known are locked too."""
    chain = index.match(keys)
    index.lock(chain)
    for key in keys[len(chain) :]:
        chain.append(index.add(key, chain[-1] if chain else None))
    return chain


def test_keys_are_chained():
    root, other = root_key("model"), root_key("model", "salt")
    keys = block_keys(root, list(range(11)), 4)
    assert len(keys) == 2 and keys[0] == block_key(root, [0, 1, 2, 3])
    assert block_keys(root, [0, 1, 2, 3, 9, 9, 9, 9], 4)[0] == keys[0]
    later = block_keys(root, [9, 1, 2, 3, 4, 5, 6, 7], 4)
    assert later[1] != keys[1]  # the same tokens after others are another block
    assert not set(block_keys(other, list(range(8)), 4)) & set(keys)
    assert block_keys(root, [1, 2, 3], 4) == []


def test_a_match_ends_where_the_chain_does():
    index = PrefixIndex(50)
    keys = block_keys(b"", list(range(16)), 4)
    grow(index, keys[:2])
    assert len(index.match(keys)) == 2 and index.match(keys[1:2]) and not index.match([b"unknown", *keys])


def test_names_are_given_again_in_the_next_plan_only():
    index = PrefixIndex(4)
    chain = grow(index, [b"1", b"2", b"3"])
    index.unlock(chain)
    gone, _ = index.evict()
    with pytest.raises(IndexError):
        index.add(b"4", None)
    index.close_plan()
    assert index.add(b"4", None).name == gone


def test_superseding_keeps_what_follows_and_costs_no_memory():
    index = PrefixIndex(50)
    old = grow(index, [b"1", b"2", b"3"])
    index.unlock(old)
    before = index.reclaimable - index.num_named
    first = index.match([b"1"])
    index.lock(first)
    new = index.supersede(old[1], first[0])
    assert index.match([b"1", b"2", b"3"]) == [old[0], new, old[2]]
    assert index.reclaimable == 2 and index.garbage == [old[1]]
    assert index.reclaimable - index.num_named == before - 2  # those that are locked now
    index.unlock([*first, new])
    order = [index.evict()[0] for _ in range(index.reclaimable)]
    assert order == [old[1].name, old[2].name, new.name, old[0].name]


def test_reset_undoes_pins_and_leaves_what_runs():
    index = PrefixIndex(50)
    chain = grow(index, [b"1", b"2"])
    pin = index.pin(index.match([b"1", b"2"]), most=50)
    assert index.num_pinned == 2
    index.forget_all()
    assert index.num_pinned == 0 and not index.match([b"1"]) and not index.garbage
    index.unpin(pin)
    index.unlock(chain)
    assert len(index.garbage) == 2 and index.num_evictable == 0


def test_any_use_keeps_the_counts_right():
    """Random chains of a few keys, locked and let go; whatever is evicted is unlocked and the last of its chain."""
    rng = random.Random(0)
    index, held, pins = PrefixIndex(2000), [], []
    for _ in range(3000):
        action = rng.random()
        if action < 0.4:
            held.append(grow(index, block_keys(b"", [rng.randrange(3) for _ in range(2 * rng.randint(1, 6))], 2)))
        elif action < 0.7 and held:
            index.unlock(held.pop(rng.randrange(len(held))), rng.randrange(3))
        elif action < 0.75 and index.blocks:
            pins.append(index.pin(index.match(block_keys(b"", [rng.randrange(3) for _ in range(8)], 2)), most=50))
        elif action < 0.8 and pins:
            index.unpin(pins.pop())
        elif action < 0.97 and index.reclaimable:
            known = set(index.blocks.values())
            index.evict()
            for block in known - set(index.blocks.values()):
                assert not block.locks and not block.children
        elif action > 0.997:
            index.forget_all()
        index.close_plan()
        blocks = index.blocks.values()
        assert index.num_evictable == sum(not block.locks for block in blocks)
        assert index.num_pinned == sum(block.pins > 0 for block in blocks)
        assert all(block.locks >= child.locks for block in blocks for child in block.children if child.key)
        assert len({block.name for block in blocks}) == len(blocks)
