"""Serving without paging: one contiguous cache [batch, max_len], prompts padded, and a batch that ends as a whole.

What people write before they have an engine. All else is the engine's own: the same Flax decoder, the same (packed)
weights, and the same attention kernels, which take the cache for pages of max_len tokens, one a row. So what differs is
how memory is given out and when a request may begin: nothing else.

B rows, L = max_len, C prompt tokens of each row computed at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jpaged_models import Attend, KVPages, LoadedModel, init_cache, merge_params, paged_attend

from jpaged.memory import pick_kv_dtype
from pallas_kernels import PagedBatch

PREFILL_TOKENS = 512  # computed at once, as by the engine's default max_num_batched_tokens


@dataclass(frozen=True)
class Job:
    """A prompt and how many tokens to generate, at least one."""

    prompt: Sequence[int]
    output: int


@dataclass
class Served:
    """What serving some jobs took. `passes` are runs of the decoder; sums go over them."""

    seconds: float = 0.0
    latency: list[float] = field(default_factory=list)  # seconds of each job, from the start of all
    tokens: list[list[int]] = field(default_factory=list)  # generated, of each job
    passes: int = 0
    live: float = 0.0  # tokens in the cache of jobs that are not done
    reserved: float = 0.0  # slots of the cache that nobody else can have
    running: float = 0.0  # jobs under way

    def count(self, passes: int, live: float, reserved: float, running: float) -> None:
        """Add passes; the rest are sums over them."""
        self.passes += passes
        self.live += live
        self.reserved += reserved
        self.running += running


class NaiveServer:
    """Greedy decoding in static batches of `batch` rows, each with room for max_len tokens."""

    def __init__(self, loaded: LoadedModel, batch: int, max_len: int) -> None:
        self.loaded, self.batch, self.max_len = loaded, batch, max_len
        # Block 0 is nobody's: what is padding is written there.
        self.cache = init_cache(loaded.config, batch + 1, max_len, pick_kv_dtype(loaded, "auto"), loaded.runs)
        self.columns = max(PREFILL_TOKENS // batch, 1)
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=1)

    def serve(self, jobs: Sequence[Job], clock: Callable[[], float] = time.perf_counter) -> Served:
        """Serve jobs in their order, `batch` at a time. A batch answers when its longest job is done."""
        for job in jobs:
            if not 0 < len(job.prompt) <= self.max_len - job.output or job.output < 1:
                raise ValueError(
                    f"a job must have a prompt and at least one token to generate, and both at most {self.max_len} "
                    f"tokens; got {len(job.prompt)} and {job.output}"
                )
        served, start = Served(), clock()
        for first in range(0, len(jobs), self.batch):
            some = jobs[first : first + self.batch]
            tokens = self._serve_batch(some, served)
            served.tokens += [row[: job.output].tolist() for row, job in zip(tokens.T, some, strict=False)]
            served.latency += [clock() - start] * len(some)
        served.seconds = clock() - start
        return served

    def _serve_batch(self, jobs: Sequence[Job], served: Served) -> np.ndarray:
        """Generated tokens i32[steps, B] of at most B jobs, which fill the batch or not."""
        prompts = np.ones(self.batch, np.int32)
        prompts[: len(jobs)] = [len(job.prompt) for job in jobs]
        outputs = np.ones(self.batch, np.int32)
        outputs[: len(jobs)] = [job.output for job in jobs]
        width, columns = int(prompts.max()), self.columns
        padded = np.zeros((self.batch, -(-width // columns) * columns), np.int32)
        for row, job in enumerate(jobs):
            padded[row, : len(job.prompt)] = job.prompt
        token = jnp.zeros(self.batch, jnp.int32)
        reserved = self.batch * self.max_len
        for start in range(0, width, columns):
            wide = min(columns, width - start)
            chunk = np.zeros(self.batch * columns, np.int32)
            chunk[: self.batch * wide] = padded[:, start : start + wide].reshape(-1)
            self.cache, token = self.prefill(self.loaded.params, self.cache, chunk, start, wide, prompts, token)
            served.count(1, np.minimum(prompts[: len(jobs)], start + wide).sum(), reserved, len(jobs))
        steps = int(outputs.max()) - 1
        self.cache, rest = self.decode(self.loaded.params, self.cache, token, prompts, outputs - 1, steps)
        done = np.arange(1, steps + 1)[:, None]  # tokens generated before each step
        busy = done < outputs[: len(jobs)]
        served.count(steps, (busy * (prompts[: len(jobs)] + done)).sum(), steps * reserved, busy.sum())
        return np.concatenate([np.asarray(token)[None], np.asarray(rest)[:steps]])

    def _attend(self, batch: PagedBatch) -> Attend:
        return paged_attend(batch, self.batch + 1)

    def _prefill(
        self,
        params: Any,
        cache: tuple[KVPages, ...],
        tokens: jax.Array,
        start: jax.Array,
        width: jax.Array,
        prompts: jax.Array,
        token: jax.Array,
    ) -> tuple[tuple[KVPages, ...], jax.Array]:
        """Columns [start, start + width) of the padded prompts, tokens i32[B * C]; and the next token of the prompts
        i32[B] that end there. What pads a prompt is computed too, and its places written over later."""
        rows = self.batch
        at = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        row, position, valid = at // width, start + at % width, at < rows * width
        batch = PagedBatch(
            block_tables=jnp.arange(1, rows + 1, dtype=jnp.int32)[:, None],
            kv_lengths=jnp.full(rows, start + width, jnp.int32),
            write_slots=jnp.where(valid, (row + 1) * self.max_len + position, 0),
            query_starts=jnp.arange(rows + 1, dtype=jnp.int32) * width,
            num_decode=jnp.int32(0),
        )
        model = merge_params(self.loaded.graphdef, params)
        hidden, cache = model(tokens, jnp.where(valid, position, 0), cache, self._attend(batch), live=rows * width)
        last = prompts - 1 - start
        ends = (last >= 0) & (last < width)
        hidden = hidden.at[jnp.arange(rows) * width + jnp.where(ends, last, 0)].get(mode="clip")
        return cache, jnp.where(ends, jnp.argmax(model.logits(hidden), axis=1).astype(jnp.int32), token)

    def _decode(
        self,
        params: Any,
        cache: tuple[KVPages, ...],
        token: jax.Array,
        lengths: jax.Array,
        left: jax.Array,
        steps: jax.Array,
    ) -> tuple[tuple[KVPages, ...], jax.Array]:
        """`steps` more tokens of every row, i32[L, B]; a row with none `left` i32[B] stands still, and is computed."""
        model = merge_params(self.loaded.graphdef, params)
        row = jnp.arange(self.batch, dtype=jnp.int32)

        def iterate(step: jax.Array, carry: tuple) -> tuple:
            cache, token, lengths, out = carry
            batch = PagedBatch(
                block_tables=row[:, None] + 1, kv_lengths=lengths + 1, write_slots=(row + 1) * self.max_len + lengths
            )
            hidden, cache = model(token, lengths, cache, self._attend(batch))
            token = jnp.argmax(model.logits(hidden), axis=1).astype(jnp.int32)
            return cache, token, jnp.where(step + 1 < left, lengths + 1, lengths), out.at[step].set(token)

        out = jnp.zeros((self.max_len, self.batch), jnp.int32)
        cache, _, _, out = lax.fori_loop(0, steps, iterate, (cache, token, lengths, out))
        return cache, out
