"""Names for the blocks that sequences fill, so that others can begin with them. Imports no JAX.

Prompt blocks are named in the plan that computes them, what a sequence generated when it leaves its slot: a decode step
costs nothing for it.
"""

from __future__ import annotations

from jpaged.config import EngineConfig
from jpaged.features import Feature
from jpaged.prefix_index import PrefixIndex, block_key, no_block, root_key
from jpaged.request import Request
from jpaged.schedule import Order
from jpaged.slots import SlotCounts


class BlockNaming:
    """Hashes requests' blocks and enters them in the index, beside the scheduler's counts."""

    def __init__(self, config: EngineConfig, index: PrefixIndex, counts: SlotCounts) -> None:
        self.config = config
        self.index = index
        self.counts = counts

    def hash_blocks(self, request: Request) -> None:
        """Know the keys of all full blocks of the request's tokens, if caching is on or it has keys of its own.

        A prompt whose log-probabilities are wanted has none: all of its tokens are to be computed.
        """
        caching = self.config.enable_prefix_caching or request.block_keys
        if caching and not request.features & Feature.PROMPT_LOGPROBS:
            self._hash(request)

    def _hash(self, request: Request) -> None:
        size, keys = self.config.block_size, request.block_keys
        for start in range(len(keys) * size, request.num_tokens - size + 1, size):
            parent = keys[-1] if keys else request.root_key
            keys.append(block_key(parent, request.token_range(start, start + size)))

    def name_blocks(
        self, request: Request, tokens: int, orders: list[Order], room: int, *, leaving: bool = False
    ) -> None:
        """Name the full blocks among the first `tokens` that have no name yet, at most `room` of them.

        Without keys (caching is off) nobody finds them by their names, which are for blocks that forks share. None
        while that would take memory that was not counted on, in the middle of a prompt longer than a window.
        """
        chain, keys, slot = request.chain, request.block_keys, request.slot
        if self.counts.is_bounded(slot):
            return
        chain += [no_block() for _ in range(len(chain), request.slid)]
        for column in range(len(chain), tokens // self.config.block_size):
            known = self.index.blocks.get(keys[column]) if keys else None
            if known is not None and (known.locks or leaving):
                # Computed by another too: ours stays private, but what follows is found after the other's.
                self.index.lock([known])
                chain.append(known)
                request.foreign.add(column)
                continue
            if room <= 0:
                break
            room -= 1
            parent = chain[-1] if chain and chain[-1].key is not None else None
            if known is not None:  # to lock it would take memory that was counted on: ours takes its place
                chain.append(self.index.supersede(known, parent))
            else:
                chain.append(self.index.add(keys[column] if keys else None, parent))
            orders.append((slot, column, chain[-1].name))
            self.counts.add_named(slot)

    def leave_slot(self, request: Request, orders: list[Order], *, swapped: bool) -> list[bytes]:
        """A sequence leaves its slot: what it computed stays to be found, as far as it is known and orders allow.

        Returns the keys of the blocks, from the first on, that stay. Without caching only those of a request that is
        swapped out do, under keys that nobody else can know, until all outputs of its prompt have ended (`forget`).
        """
        computed = request.prefilled >= request.prefill_target
        if self.config.enable_prefix_caching:
            if computed:
                self.hash_blocks(request)
        elif swapped and not request.features & Feature.PROMPT_LOGPROBS:
            self._make_private(request)
        if request.block_keys and (self.config.enable_prefix_caching or swapped):
            tokens = min(int(self.counts.kv_known[request.slot]), request.num_tokens)
            room = self.config.max_blocks_per_seq + 4 * self.config.max_num_seqs - len(orders)
            self.name_blocks(request, tokens if computed else request.prefilled, orders, room, leaving=True)
        keys: list[bytes] = []
        locked = request.chain[request.slid :]
        for block in locked:
            if block.key is None:
                break
            keys.append(block.key)
        self.index.unlock(locked, request.priority, request.admitted)
        request.chain, request.slid, request.foreign = [], 0, set()
        return keys

    def _make_private(self, request: Request) -> None:
        """Give a request keys that only it and its siblings have, those blocks included that they share already."""
        request.root_key = root_key("request", request.arrival)
        self._hash(request)
        parent = None
        for block, key in list(zip(request.chain, request.block_keys, strict=False))[request.slid :]:
            if block.key is None and key not in self.index.blocks:
                self.index.give_key(block, key, parent)
            parent = block

    def forget(self, request: Request) -> None:
        """A request has ended. Without caching nobody comes back to its blocks once all outputs of its prompt have."""
        if not self.config.enable_prefix_caching and request.group_finished:
            for key in {key for each in request.group for key in each.block_keys}:
                if key in self.index.blocks:
                    self.index.forget(self.index.blocks[key])
