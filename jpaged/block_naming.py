"""Names for the blocks that sequences fill, so that others can begin with them. Imports no JAX.

Prompt blocks are named in the plan that computes them, what a sequence generated when it leaves its slot: a decode step
costs nothing for it.
"""

from __future__ import annotations

from jpaged.config import EngineConfig
from jpaged.features import Feature
from jpaged.prefix_index import PrefixIndex, block_key
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
        """Know the keys of all full blocks of the request's tokens, as far as caching is on.

        A prompt whose log-probabilities are wanted has none: all of its tokens are to be computed.
        """
        if not self.config.enable_prefix_caching or request.features & Feature.PROMPT_LOGPROBS:
            return
        size, keys = self.config.block_size, request.block_keys
        for start in range(len(keys) * size, request.num_tokens - size + 1, size):
            parent = keys[-1] if keys else request.root_key
            keys.append(block_key(parent, request.token_range(start, start + size)))

    def name_blocks(
        self, request: Request, tokens: int, orders: list[Order], room: int, *, leaving: bool = False
    ) -> None:
        """Name the full blocks among the first `tokens` that have no name yet, at most `room` of them.

        Without keys (caching is off) nobody finds them by their names, which are for blocks that forks share.
        """
        chain, keys, slot = request.chain, request.block_keys, request.slot
        for column in range(len(chain), tokens // self.config.block_size):
            known = self.index.blocks.get(keys[column]) if keys else None
            if known is not None and (known.locks or leaving):
                # Computed by another too: ours stays private, but what follows is found after the other's.
                self.index.lock([known])
                chain.append(known)
                continue
            if room <= 0:
                break
            room -= 1
            parent = chain[-1] if chain else None
            if known is not None:  # to lock it would take memory that was counted on: ours takes its place
                chain.append(self.index.supersede(known, parent))
            else:
                chain.append(self.index.add(keys[column] if keys else None, parent))
            orders.append((slot, column, chain[-1].name))
            self.counts.add_named(slot)

    def leave_slot(self, request: Request, orders: list[Order]) -> None:
        """A sequence leaves its slot: what it computed stays to be found, as far as it is known and orders allow."""
        if request.prefilled >= request.prefill_target:
            self.hash_blocks(request)
        if request.block_keys and request.prefilled >= request.prefill_target:
            tokens = min(int(self.counts.kv_known[request.slot]), request.num_tokens)
            room = self.config.max_blocks_per_seq + 4 * self.config.max_num_seqs - len(orders)
            self.name_blocks(request, tokens, orders, room, leaving=True)
        self.index.unlock(request.chain, request.priority)
        request.chain = []
