"""Everything that shares, moves or frees blocks, in any order, on a pool that is too small: nobody's tokens change.

Checked after every operation: the allocator's invariants and that host and device count alike. At the end all blocks
are back, and every output is what an engine gives that runs without sharing and is not disturbed.
"""

import functools
import tempfile

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiny import finish, preempt, run_all, tiny_engine

from jpaged import BeamSearchParams, Engine, SamplingParams


@functools.lru_cache
def undisturbed() -> Engine:
    return tiny_engine(enable_prefix_caching=False)


class SharingMachine(RuleBasedStateMachine):
    """Prompts that begin alike, with several outputs, one, or beams; aborts, preemption, eviction, pins and resets."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        # Swap space for one sequence or two, as much for cached blocks, a few more in files, at 1 kB a block: what
        # finds no room is computed again.
        self.engine = tiny_engine(
            num_blocks=34,
            watermark=0.0,
            preemption="swap",
            swap_space_bytes=20 << 10,
            prefix_cache_host_bytes=20 << 10,
            prefix_cache_dir=self.folder.name,
            prefix_cache_disk_bytes=10 << 10,
        )
        self.requests = []
        self.searches = []
        self.pins = []

    @rule(head=st.integers(0, 2), length=st.integers(1, 50), own=st.integers(0, 3), count=st.integers(1, 3))
    def add(self, head: int, length: int, own: int, count: int) -> None:
        prompt = [(11 * head + 3 * i) % 90 + 3 for i in range(length)] + [50 + own] * own
        for _ in range(count):
            self.add_prompt(prompt, SamplingParams(temperature=0, max_tokens=self.count_up(), ignore_eos=True))

    @rule(length=st.integers(1, 40), outputs=st.integers(1, 10), seed=st.integers(0, 3))
    def add_sampled(self, length: int, outputs: int, seed: int) -> None:
        prompt = [(7 * i) % 90 + 3 for i in range(length)]
        params = SamplingParams(n=outputs, seed=seed, max_tokens=self.count_up(), ignore_eos=True)
        self.add_prompt(prompt, params)

    @rule(length=st.integers(1, 30), width=st.integers(1, 4), tokens=st.integers(1, 8))
    def add_beams(self, length: int, width: int, tokens: int) -> None:
        prompt = [(7 * i) % 90 + 3 for i in range(length)]
        params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        try:
            self.searches.append(self.engine.add_request(f"beam {len(self.searches)}", prompt, beams=params))
        except ValueError as error:
            assert "blocks of 4 tokens, but only" in str(error) and self.pins

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """The next turn of a conversation."""
        if self.requests:
            last = data.draw(st.sampled_from(self.requests))
            prompt = (last.prompt_token_ids + last.output_token_ids)[:60]
            self.add_prompt(prompt, SamplingParams(temperature=0, max_tokens=self.count_up(), ignore_eos=True))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.engine.requests:
            self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @rule(evicted=st.integers(0, 33))
    def preempt(self, evicted: int) -> None:
        """A plan in which the last sequence has to go, and blocks of the cache: to the host, if it holds them."""
        preempt(self.engine, evicted)

    @rule()
    def save(self) -> None:
        self.engine.save_prefix_cache()

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        if self.pins and data.draw(st.booleans()):
            self.engine.unpin_prefix(self.pins.pop())
        elif self.requests:
            try:
                self.pins.append(self.engine.pin_prefix(data.draw(st.sampled_from(self.requests)).prompt_token_ids))
            except ValueError as error:
                assert "blocks would be pinned" in str(error)

    @invariant()
    def is_sound(self) -> None:
        self.engine.audit()

    def teardown(self) -> None:
        for pin in self.pins:
            self.engine.unpin_prefix(pin)
        finish(self.engine)
        self.engine.reset_prefix_cache()
        self.engine.audit()
        self.engine.scheduler.store.disk.flush()
        self.folder.cleanup()
        stats = self.engine.stats()
        assert stats.blocks.free == stats.blocks.total
        assert stats.swap.host_blocks == stats.swap.held_blocks == 0
        outputs = [output for request in self.requests for output in request.group]
        params = [
            SamplingParams(
                temperature=each.params.temperature, seed=each.seed, max_tokens=each.max_tokens, ignore_eos=True
            )
            for each in outputs
        ]
        expected = run_all(undisturbed(), [each.prompt_token_ids for each in outputs], params)
        for each, tokens in zip(outputs, expected, strict=True):
            count = len(each.output_token_ids)
            assert each.finish_reason == "abort" or count == each.max_tokens
            assert each.output_token_ids == tokens[:count]

        searches = [request for request in self.searches if request.finish_reason != "abort"]
        undone = [
            undisturbed().add_request(str(i), request.prompt_token_ids, beams=request.beams.params)
            for i, request in enumerate(searches)
        ]
        finish(undisturbed())
        for request, alone in zip(searches, undone, strict=True):
            found, expected = request.beams.finished, alone.beams.finished
            assert [each.beam.tokens() for each in found] == [each.beam.tokens() for each in expected]

    def count_up(self) -> int:
        return 1 + len(self.requests) % 9

    def add_prompt(self, prompt: list[int], params: SamplingParams) -> None:
        self.requests.append(self.engine.add_request(str(len(self.requests)), prompt, params))


SharingMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSharingMachine = SharingMachine.TestCase
