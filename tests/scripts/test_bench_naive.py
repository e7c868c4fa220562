"""Static batches over contiguous KV: the tokens are the engine's, and what is counted is what was reserved."""

from __future__ import annotations

import numpy as np
import pytest
from bench_naive import serve_paged, summarize
from naive_serving import Job, NaiveServer
from tiny import greedy_reference, make_prompts, tiny_engine, tiny_model

OUTPUTS = [5, 1, 9, 4, 7]


def test_tokens_and_counts() -> None:
    jobs = [Job(prompt, output) for prompt, output in zip(make_prompts(5, 30), OUTPUTS, strict=True)]
    server = NaiveServer(tiny_model(), batch=3, max_len=64)
    server.columns = 16  # so that prompts are computed in two pieces
    served = server.serve(jobs)
    assert served.tokens == [greedy_reference(list(job.prompt), job.output) for job in jobs]
    chunks = [-(-max(len(job.prompt) for job in some) // 16) for some in (jobs[:3], jobs[3:])]
    assert served.passes == sum(chunks) + (9 - 1) + (7 - 1)
    assert served.reserved == served.passes * 3 * 64
    assert served.running == 3 * chunks[0] + 2 * chunks[1] + sum(output - 1 for output in OUTPUTS)
    paged = serve_paged(tiny_engine(enable_prefix_caching=False), jobs)
    assert paged.tokens == served.tokens
    assert paged.live <= paged.reserved
    running, utilization, of_memory, rate, latency, _ = summarize(served, jobs, 3 * 64)
    assert 0 < utilization < 100 and utilization == pytest.approx(of_memory) and running <= 3
    assert rate * served.seconds == pytest.approx(sum(OUTPUTS)) and latency <= served.seconds


def test_what_does_not_fit_is_refused() -> None:
    server = NaiveServer(tiny_model(), batch=2, max_len=64)
    for job in (Job([1] * 60, 5), Job([], 5), Job([1], 0)):
        with pytest.raises(ValueError, match="at most 64"):
            server.serve([job])
    assert np.asarray(server.cache[0].k).shape[0] == 3
