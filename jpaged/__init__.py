"""jpaged: PagedAttention as a functional JAX program.

from jpaged import LLM, SamplingParams

llm = LLM("path/to/model")
outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, max_tokens=64))
"""

import gc

_collects = gc.isenabled()
gc.disable()  # what is imported stays: to look through it for garbage would be a quarter of the time to import

from jpaged.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.functional import FunctionalEngine
from jpaged.llm import LLM
from jpaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from jpaged.stats import EngineStats
from jpaged.structured_params import StructuredOutputsParams

if _collects:
    gc.enable()

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FunctionalEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
