"""The host's store of blocks against a plain model of it: what is kept, for whom, within which budget. No JAX."""

import json
import logging
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.tiers import CHECKSUM_BYTES, LABEL, DiskStore, HostStore, StoredBlock, open_disk_store

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


# ---------------------------------------------------------------- files

FILE = 4 + CHECKSUM_BYTES  # bytes of a block of 4 in a file
IDENTITY = {"model": "abc", "block_size": 4}


def open_store(folder, blocks: int = 3, **changes) -> DiskStore | None:
    return open_disk_store(folder, {**IDENTITY, **changes}, 4, blocks * FILE)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_files_in_any_order_of_operations(data):
    """Put, read, damage, removal by others, a new process: within the budget, and never wrong content."""
    blocks = data.draw(st.integers(1, 4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, order = open_store(folder, blocks), []
        for _ in range(data.draw(st.integers(1, 20))):
            action = data.draw(st.sampled_from(["put", "put", "read", "reopen", "damage", "remove", "clear"]))
            key = data.draw(st.sampled_from(KEYS[:6]))
            if action == "put":
                store.put(key, content(key), wait=True)
                order = [each for each in order if each != key] + [key]
                order = order[-blocks:]
            elif action == "read" and key in store:
                assert (store.read(key) == content(key)).all()
                order = [each for each in order if each != key] + [key]
            elif action == "reopen":
                store.flush()
                assert len(list(folder.glob("*.kv"))) == len(order)
                store = open_store(folder, blocks)
                assert set(store.keys) == set(order)
                order = list(store.keys)  # by the files' times, which may be equal
            elif action in ("damage", "remove") and key in store:
                store.flush()
                path = folder / f"{key.hex()}.kv"
                if action == "remove":
                    path.unlink()
                else:
                    raw = bytearray(path.read_bytes())
                    raw[data.draw(st.integers(0, FILE - 1))] ^= 1 + data.draw(st.integers(0, 254))
                    path.write_bytes(raw)
                damaged = store.damaged
                assert store.read(key) is None and key not in store
                assert store.damaged == damaged + (action == "damage")
                order.remove(key)
            elif action == "clear":
                store.clear()
                order = []
            assert list(store.keys) == order and len(store) <= blocks
        store.clear()
        store.flush()
        assert [path.name for path in folder.iterdir()] == [LABEL]


def test_a_block_is_not_taken_for_another(tmp_path):
    store = open_store(tmp_path)
    store.put(KEYS[0], content(KEYS[0]))
    store.flush()
    (tmp_path / f"{KEYS[0].hex()}.kv").rename(tmp_path / f"{KEYS[1].hex()}.kv")
    assert open_store(tmp_path).read(KEYS[1]) is None


def test_what_a_process_left_half_written_is_not_found(tmp_path):
    open_store(tmp_path)
    (tmp_path / f"{KEYS[0].hex()}.kv").write_bytes(b"short")
    (tmp_path / f"{KEYS[1].hex()}.kv.123").write_bytes(b"being written by another")
    assert len(open_store(tmp_path)) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".123"}


@pytest.mark.parametrize("changes", [{"model": "abd"}, {"block_size": 8}, {"more": 1}])
def test_a_folder_of_something_else_is_left_alone_with_a_warning(tmp_path, changes, caplog):
    store = open_store(tmp_path)
    store.put(KEYS[0], content(KEYS[0]))
    store.flush()
    before = sorted(path.name for path in tmp_path.iterdir())
    with caplog.at_level(logging.WARNING):
        assert open_store(tmp_path, **changes) is None
    assert next(iter(changes)) in caplog.text and "not used" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert KEYS[0] in open_store(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"format": 0, **IDENTITY})])
def test_a_label_that_is_damaged_or_old(tmp_path, text, caplog):
    (tmp_path / LABEL).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert open_store(tmp_path) is None
    assert "not used" in caplog.text and (tmp_path / LABEL).read_text() == text


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"prefix_cache_dir .*file' cannot be used"):
        open_store(tmp_path / "file")


def test_a_disk_that_is_full_costs_the_block_only(tmp_path, caplog, monkeypatch):
    store = open_store(tmp_path)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    store.put(KEYS[0], content(KEYS[0]))
    store.flush()
    assert "no space left" in caplog.text and store.read(KEYS[0]) is None and len(store) == 0
    store.flush()
    assert [path.name for path in tmp_path.iterdir()] == [LABEL]


def test_memory_then_files_and_back(tmp_path):
    store = HostStore(4, cache_bytes=8, disk=open_store(tmp_path, 3))
    for key in reversed(KEYS[:4]):
        put(store, key)
    assert set(store.blocks) == set(KEYS[:2]) and set(store.disk.keys) == set(KEYS[2:4])
    assert store.match(KEYS[:5]) == 4
    found = store.fetch(KEYS[:5])
    assert [(block.key, block.data[0]) for block in found] == [(key, key[0]) for key in KEYS[:4]]
    assert set(store.blocks) == set(KEYS[:2]) and set(store.disk.keys) == set(KEYS[2:4])  # a beginning goes last
    store.disk.flush()
    (tmp_path / f"{KEYS[2].hex()}.kv").write_bytes(b"x" * FILE)
    assert [block.key for block in store.fetch(KEYS[:4])] == KEYS[:2]
    assert store.match(KEYS[:4]) == 2 and store.match(KEYS[3:4]) == 1
    store.clear()
    store.disk.flush()
    assert store.match(KEYS[:1]) == 0 and [path.name for path in tmp_path.iterdir()] == [LABEL]


def test_files_alone(tmp_path):
    """Without memory for them blocks pass through on their way to files."""
    store = HostStore(4, swap_bytes=4, disk=open_store(tmp_path, 3))
    assert store.hold(KEYS[:2]) == 1
    for key in KEYS[:3]:
        put(store, key)
    assert set(store.blocks) == {KEYS[0]} and set(store.disk.keys) == set(KEYS[1:3])
    assert store.put(KEYS[1]) is None
    assert [block.data[0] for block in store.fetch(KEYS[:3])] == [key[0] for key in KEYS[:3]]
    assert set(store.blocks) == {KEYS[0]}
    store.let_go(KEYS[:1])
    assert not store.blocks and set(store.disk.keys) == set(KEYS[:3])
