"""Blocks of the KV cache that are not on the device: in host memory or in files, by content. Plain Python and NumPy.

A block has the key that the prefix index knows it by (see prefix_index.py), so whoever asks for the same beginning
finds it, on the device, here, or not at all. Three budgets, all in whole blocks:

    swap    blocks of preempted requests, from the moment of the preemption: the room is theirs although a block may
            still be on the device, and never need the journey
    cache   blocks that the device evicted and nobody waits for; the longest unused goes first
    disk    those that go from there

The content of a block arrives some time after its place was taken (`data` is None until then): the copy from the device
is under way, and nobody waits for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)
FORMAT = 1  # of a folder of blocks
LABEL = "prefix-cache.json"  # says what the blocks of a folder are of
BLOCK_SUFFIX = ".kv"
CHECKSUM_BYTES = 16
MAX_WRITES = 64  # blocks that wait for their file
STALE_SECONDS = 3600  # age of a half written file that nobody writes any more


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A block on the host. data: u8[block_bytes], None while it is on its way."""

    key: bytes
    data: np.ndarray | None = None


class HostStore:
    """Blocks in host memory, before a `DiskStore` if there is one. Cost of each operation: constant for each block."""

    def __init__(
        self, block_bytes: int, swap_bytes: int = 0, cache_bytes: int = 0, disk: DiskStore | None = None
    ) -> None:
        self.block_bytes = block_bytes
        self.disk = disk
        self.swap_blocks = swap_bytes // block_bytes
        self.cache_blocks = cache_bytes // block_bytes
        self.blocks: dict[bytes, StoredBlock] = {}
        self.holds: dict[bytes, int] = {}  # key -> preempted requests that come back to it
        self.unheld: OrderedDict[bytes, StoredBlock] = OrderedDict()  # of the blocks, the longest unused first

    @property
    def in_use(self) -> bool:
        """Whether there is room for anything."""
        return self.swap_blocks > 0 or self.cache_blocks > 0 or self.disk is not None

    def hold(self, keys: Sequence[bytes]) -> int:
        """Keep room for the blocks a preempted request comes back to. Returns how many, from the first on, have it."""
        for count, key in enumerate(keys):
            if key not in self.holds:
                if len(self.holds) >= self.swap_blocks:
                    return count
                self.unheld.pop(key, None)
            self.holds[key] = self.holds.get(key, 0) + 1
        return len(keys)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Undo a `hold`: the request runs again or has ended. The blocks stay as far as the cache's budget goes."""
        for key in reversed(keys):  # a beginning is of more use than what follows it
            self.holds[key] -= 1
            if not self.holds[key]:
                del self.holds[key]
                if key in self.blocks:
                    self.unheld[key] = self.blocks[key]
        self._shrink()

    def put(self, key: bytes) -> StoredBlock | None:
        """The device gives up a block. Returns its place, to be filled (`arrive`); None if it is here or not wanted."""
        if key in self.unheld:
            self.unheld.move_to_end(key)
        wanted = key in self.holds or self.cache_blocks or (self.disk is not None and key not in self.disk)
        if key in self.blocks or not wanted:
            return None
        block = self.blocks[key] = StoredBlock(key)
        if key not in self.holds:
            self.unheld[key] = block
            self._shrink()
        return block

    def arrive(self, block: StoredBlock, data: np.ndarray) -> None:
        """The content of a block is here, u8[block_bytes], nobody else's."""
        block.data = data
        self._shrink()

    def match(self, keys: Sequence[bytes]) -> int:
        """How many blocks of the beginning of `keys` are here."""
        files: Container[bytes] = () if self.disk is None else self.disk
        return next((count for count, key in enumerate(keys) if key not in self.blocks and key not in files), len(keys))

    def fetch(self, keys: Sequence[bytes]) -> list[StoredBlock]:
        """The blocks of the longest beginning of `keys` that is here. Reads files; one that is damaged ends it."""
        found = []
        for key in keys[: self.match(keys)]:
            block = self.blocks.get(key)
            if block is None:
                assert self.disk is not None
                data = self.disk.read(key)
                if data is None:
                    break
                block = StoredBlock(key, data)
            found.append(block)
        for block in reversed(found):
            if block.key in self.unheld:
                self.unheld.move_to_end(block.key)
            elif block.key not in self.blocks and self.cache_blocks:
                self.blocks[block.key] = self.unheld[block.key] = block
        self._shrink()
        return found

    def clear(self) -> None:
        """Forget all blocks, files too; the room that preempted requests have stays theirs."""
        self.blocks.clear()
        self.unheld.clear()
        if self.disk is not None:
            self.disk.clear()

    def _shrink(self) -> None:
        """Keep the cache within its budget, but for blocks on their way."""
        while len(self.unheld) > self.cache_blocks:
            oldest = next((block for block in self.unheld.values() if block.data is not None), None)
            if oldest is None:
                return
            del self.unheld[oldest.key], self.blocks[oldest.key]
            if self.disk is not None and oldest.data is not None:
                self.disk.put(oldest.key, oldest.data)


class DiskStore:
    """Blocks in files of one folder, the longest unused of which go first. Files stay for the next process.

    A file holds a checksum and the content, and is complete or not there. Files are written and removed by a thread,
    read by whoever asks. Several processes may use a folder; each sees what was there when it started and its own.
    """

    def __init__(self, folder: Path, block_bytes: int, max_bytes: int) -> None:
        """For a folder that `open_disk_store` has looked at."""
        self.folder = folder
        self.file_bytes = block_bytes + CHECKSUM_BYTES
        self.max_blocks = max_bytes // self.file_bytes
        self.reads = 0
        self.damaged = 0  # files whose checksum was wrong
        self.keys: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self.writing: dict[bytes, np.ndarray] = {}  # blocks whose file is not there yet
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="prefix-cache")
        for path in self._find_files():
            self.keys[bytes.fromhex(path.stem)] = None
        self._shrink()

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def __len__(self) -> int:
        return len(self.keys)

    def put(self, key: bytes, data: np.ndarray, *, wait: bool = False) -> None:
        """Keep a block. Where the thread is far behind it is left out, or, with `wait`, waited for."""
        if key in self.keys:
            self.keys.move_to_end(key)
            return
        if len(self.writing) >= MAX_WRITES:
            if not wait:
                return
            self.flush()
        self.keys[key] = None
        self.writing[key] = data
        self.thread.submit(self._write, key, data)
        self._shrink()

    def read(self, key: bytes) -> np.ndarray | None:
        """A block's content; None, and the block is forgotten, if its file is gone or damaged."""
        data = self.writing.get(key)
        if data is None:
            data = self._read_file(key)
        if data is None:
            del self.keys[key]
            self.thread.submit(self._remove, [key])
            return None
        self.reads += 1
        self.keys.move_to_end(key)
        return data

    def clear(self) -> None:
        """Remove all blocks."""
        self.thread.submit(self._remove, list(self.keys))
        self.keys.clear()

    def flush(self) -> None:
        """Wait until everything is written."""
        self.thread.submit(lambda: None).result()

    def _shrink(self) -> None:
        gone = []
        while len(self.keys) > self.max_blocks:
            gone.append(self.keys.popitem(last=False)[0])
        if gone:
            self.thread.submit(self._remove, gone)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{BLOCK_SUFFIX}"

    def _find_files(self) -> list[Path]:
        """Files of whole blocks, the oldest first; what a process left half written is removed."""
        found = []
        for path in self.folder.glob(f"*{BLOCK_SUFFIX}*"):
            status = path.stat()
            if path.suffix == BLOCK_SUFFIX and status.st_size == self.file_bytes:
                found.append((status.st_mtime_ns, path))
            elif path.suffix == BLOCK_SUFFIX or time.time() - status.st_mtime > STALE_SECONDS:
                path.unlink(missing_ok=True)
        return [path for _, path in sorted(found)]

    def _read_file(self, key: bytes) -> np.ndarray | None:
        try:
            content = np.fromfile(self._path(key), np.uint8)
            os.utime(self._path(key))  # its age is what it is found by when a process starts
        except OSError:
            return None  # another process made room
        checksum, data = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
        if len(content) != self.file_bytes or checksum.tobytes() != _checksum(key, data):
            self.damaged += 1
            log.warning("prefix cache: %s is damaged and left out", self._path(key))
            return None
        return data

    def _write(self, key: bytes, data: np.ndarray) -> None:
        path = self._path(key)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with open(part, "wb") as file:
                file.write(_checksum(key, data))
                file.write(data.data)
            part.replace(path)
        except OSError as error:
            log.warning("prefix cache: %s cannot be written: %s", path, error)
            part.unlink(missing_ok=True)
        self.writing.pop(key, None)

    def _remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)


def open_disk_store(
    folder: str | Path, identity: Mapping[str, object], block_bytes: int, max_bytes: int
) -> DiskStore | None:
    """The blocks in a folder, which is made if it is not there; None, with a warning, if they are of something else.

    identity: what the content of blocks depends on besides their keys, in values that JSON has. ValueError if the
    folder cannot be used.
    """
    folder, expected = Path(folder), {"format": FORMAT, **identity}
    label = folder / LABEL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not label.exists():
            label.write_text(json.dumps(expected, indent=1) + "\n")
        text = label.read_text()
    except OSError as error:
        raise ValueError(f"prefix_cache_dir {str(folder)!r} cannot be used: {error}") from error
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        log.warning("prefix cache: %s is damaged; the folder is left as it is and not used", label)
        return None
    differing = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if differing:
        said = ", ".join(f"{name} is {found.get(name)!r}, not {expected.get(name)!r}" for name in differing)
        log.warning("prefix cache: what is in %s is of another model or format (%s) and not used", folder, said)
        return None
    return DiskStore(folder, block_bytes, max_bytes)


def _checksum(key: bytes, data: np.ndarray) -> bytes:
    """Of the content and of which block it is."""
    digest = hashlib.blake2b(key, digest_size=CHECKSUM_BYTES)
    digest.update(data.data)
    return digest.digest()
