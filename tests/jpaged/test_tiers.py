"""The host's store of blocks against a plain model of it: what is kept, for whom, within which budget. No JAX."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.tiers import HostStore, StoredBlock

KEYS = [bytes([65 + i]) for i in range(12)]


def content(key: bytes) -> np.ndarray:
    return np.full(4, key[0], np.uint8)


def put(store: HostStore, key: bytes) -> None:
    block = store.put(key)
    if block is not None:
        store.arrive(block, content(key))


class Model:
    """The same store with lists that are searched."""

    def __init__(self, swap: int, cache: int) -> None:
        self.swap, self.cache = swap, cache
        self.holds: list[list[bytes]] = []  # keys that requests hold
        self.order: list[bytes] = []  # all blocks, the longest unused first
        self.coming: set[bytes] = set()

    @property
    def held(self) -> set[bytes]:
        return {key for keys in self.holds for key in keys}

    def hold(self, keys: list[bytes]) -> int:
        self.holds.append([])
        for key in keys:
            if key not in self.held and len(self.held) == self.swap:
                break
            self.holds[-1].append(key)
        return len(self.holds[-1])

    def let_go(self, number: int) -> None:
        for key in reversed(self.holds.pop(number)):
            if key in self.order and key not in self.held:
                self.use(key)
        self.shrink()

    def put(self, key: bytes) -> bool:
        if key in self.order:
            if key not in self.held:
                self.use(key)
            return False
        if key not in self.held and not self.cache:
            return False
        self.order.append(key)
        self.coming.add(key)
        self.shrink()
        return True

    def use(self, key: bytes) -> None:
        self.order.remove(key)
        self.order.append(key)

    def shrink(self) -> None:
        unheld = [key for key in self.order if key not in self.held]
        here = [key for key in unheld if key not in self.coming]
        for key in here[: max(len(unheld) - self.cache, 0)]:
            self.order.remove(key)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_order_of_operations(data):
    """Room is given in order and never beyond the budget; what is held stays, what is not goes by age."""
    swap, cache = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 5))
    store, model = HostStore(4, swap_bytes=4 * swap + 3, cache_bytes=4 * cache), Model(swap, cache)
    coming: list[StoredBlock] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["hold", "let go", "put", "arrive", "fetch", "clear"]))
        start = data.draw(st.integers(0, 8))
        keys = KEYS[start : start + data.draw(st.integers(0, 5))]
        if action == "hold":
            assert store.hold(keys) == model.hold(keys)
        elif action == "let go" and model.holds:
            number = data.draw(st.integers(0, len(model.holds) - 1))
            store.let_go(model.holds[number])
            model.let_go(number)
        elif action == "put":
            for key in keys:
                block = store.put(key)
                assert (block is not None) == model.put(key)
                coming += [] if block is None else [block]
        elif action == "arrive" and coming:
            block = coming.pop(0)
            store.arrive(block, content(block.key))
            if store.blocks.get(block.key) in (block, None):  # else one that came later: this was forgotten
                model.coming.discard(block.key)
            model.shrink()
        elif action == "fetch":
            found = store.fetch(keys)
            assert [block.key for block in found] == keys[: store.match(keys)]
            for key in reversed(keys[: len(found)]):
                model.use(key)
        elif action == "clear":
            store.clear()
            model.order, model.coming = [], set()
        assert set(store.holds) == model.held and len(store.holds) <= swap
        assert set(store.blocks) == set(model.order)
        assert list(store.unheld) == [key for key in model.order if key not in model.held]
        assert len(set(store.unheld) - model.coming) <= cache
        for key, block in store.blocks.items():
            assert block.key == key and (block.data is None) == (key in model.coming)
            assert block.data is None or (block.data == content(key)).all()


def test_the_longest_unused_goes_first_and_a_beginning_last():
    store = HostStore(4, swap_bytes=0, cache_bytes=12)
    for key in reversed(KEYS[:3]):  # the device gives up the end of a sequence first
        put(store, key)
    put(store, KEYS[5])
    assert store.match(KEYS[:3]) == 2
    assert [block.key for block in store.fetch(KEYS[:3])] == KEYS[:2]
    put(store, KEYS[6])
    assert store.match(KEYS[:3]) == 2 and store.match(KEYS[5:6]) == 0
    put(store, KEYS[7])
    assert store.match(KEYS[:3]) == 1


def test_without_a_budget_nothing_is_wanted():
    store = HostStore(4)
    assert store.put(KEYS[0]) is None and store.hold(KEYS) == 0 and not store.in_use


def test_a_block_that_was_forgotten_on_its_way_reaches_whoever_has_it():
    store = HostStore(4, swap_bytes=8)
    assert store.hold(KEYS[:2]) == 2
    block = store.put(KEYS[0])
    store.clear()
    store.arrive(block, content(KEYS[0]))
    assert block.data is not None and not store.blocks and store.match(KEYS[:1]) == 0
    store.let_go(KEYS[:2])
    assert not store.holds
