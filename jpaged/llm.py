"""The Python interface: load a model, generate for a list of prompts. Names and meanings follow vLLM."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
from jpaged_models import (
    LoadedModel,
    Tokenizer,
    check_quantization,
    load_model,
    pack_model,
    pick_linear_backend,
)
from tqdm import tqdm

from jpaged.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jpaged.compilation_cache import enable_compilation_cache
from jpaged.completion import OutputStream, make_completion, make_output, make_refusal
from jpaged.config import EngineConfig
from jpaged.controls import Processor
from jpaged.engine import Engine, PinnedPrefix
from jpaged.memory import find_window, pick_kv_dtype, pick_num_blocks
from jpaged.outputs import RequestOutput
from jpaged.policies import SchedulingPolicy
from jpaged.prefix_index import EvictionPolicy
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.stats import EngineStats
from jpaged.validation import gib_to_bytes

# Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; dicts may have a "cache_salt" too.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model with its engine.

        llm = LLM("path/to/model")
        for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=64)):
            print(output.outputs[0].text)

    model                   a Hugging Face folder or hub id, a .gguf file, a jpaged checkpoint, or a LoadedModel
    tokenizer               another folder, hub id or Tokenizer; by default the model's own
    dtype                   "auto" (as stored), "float32" or "bfloat16": of weights and activations
                            (a LoadedModel has both already: another tokenizer or dtype is refused)
    quantization            None, or "int8": weights of 8 bits (products by the native CPU kernels only)
    max_model_len           longest prompt + output; by default the model's limit, or what the KV pool holds
    max_num_seqs            sequences that run at once (default 32 on CPU, 256 elsewhere)
    max_num_batched_tokens  most tokens in one step (default 512 on CPU, 2048 elsewhere)
    block_size              tokens in a KV block
    num_blocks              KV blocks, the null block included; by default from the two below
    kv_cache_dtype          what keys and values are stored in: "auto" (as dtype), "float32", "bfloat16", "float16",
                            "int8" or "fp8" (e4m3), the last two with a scale for each token and head
    kv_cache_memory_bytes   bytes for KV blocks
    memory_fraction         share of the device's memory to use where neither is given (on CPU at most 4 GiB of KV)
    seed                    of the seeds that requests without one are given
    decode_steps            most decode iterations in one dispatch
    watermark               share of the pool that admission leaves free
    async_scheduling        plan a step while the previous one runs
    enable_prefix_caching   keep computed blocks for later prompts that begin with the same tokens
    preemption              what becomes of a sequence that makes way when memory runs out: "recompute" computes it
                            again, "swap" copies its blocks to host memory and back, "auto" does what takes less time
    swap_space              GiB of host memory for such blocks, taken as they are needed
    prefix_cache_host_bytes host memory for cached blocks that the device has no room for (default: none)
    prefix_cache_dir        folder for cached blocks that the host has no room for; a later process with the same model
                            finds them again (see also save_prefix_cache)
    prefix_cache_disk_bytes most bytes in that folder (default: 16 GiB)
    scheduling_policy       who is served first: "fcfs", "priority", "fair" or an object (see jpaged/policies.py)
    eviction_policy         which cached block goes first: an object (see EvictionPolicy in jpaged/prefix_index.py); by
                            default the least recently used
    tensor_parallel_size    devices to divide the model among; memory_fraction and kv_cache_memory_bytes are of each
    max_logprobs, max_logit_bias, max_bad_words, max_bad_word_tokens
                            the most a request may ask for, see EngineConfig
    logits_processor        a function of your own on the logits of requests that give extra_args, see EngineConfig
    processor_args          {name: default} of the extra_args it takes
    warm_up                 compile every program now rather than when it is first needed
    compilation_cache_dir   where compiled programs are kept; by default the user's cache folder
    progress                show a bar while warming up

    Raises ValueError for settings or checkpoints that cannot work.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
        memory_fraction: float = 0.9,
        seed: int = 0,
        decode_steps: int = 8,
        watermark: float = 0.01,
        async_scheduling: bool = True,
        enable_prefix_caching: bool = True,
        preemption: str = "auto",
        swap_space: float = 4.0,
        prefix_cache_host_bytes: int = 0,
        prefix_cache_dir: str | Path | None = None,
        prefix_cache_disk_bytes: int = 16 << 30,
        scheduling_policy: str | SchedulingPolicy = "fcfs",
        eviction_policy: EvictionPolicy | None = None,
        attention_backend: str = "auto",
        linear_backend: str = "auto",
        tensor_parallel_size: int = 1,
        max_logprobs: int = 20,
        max_logit_bias: int = 512,
        max_bad_words: int = 64,
        max_bad_word_tokens: int = 16,
        logits_processor: Processor | None = None,
        processor_args: Mapping[str, float] | None = None,
        warm_up: bool = True,
        compilation_cache_dir: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        if isinstance(model, LoadedModel):
            _check_loaded(model, dtype, tokenizer)
        linear = pick_linear_backend(linear_backend, tensor_parallel_size)
        check_quantization(quantization, linear)
        enable_compilation_cache(compilation_cache_dir)
        if isinstance(model, LoadedModel):
            self.loaded = model.split(tensor_parallel_size)
        else:
            self.loaded = load_model(model, dtype, tokenizer, tensor_parallel_size=tensor_parallel_size)
        self.tokenizer = self.loaded.tokenizer
        on_cpu = jax.default_backend() == "cpu"
        max_num_seqs = max_num_seqs if max_num_seqs is not None else (32 if on_cpu else 256)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_num_seqs, 512 if on_cpu else 2048)
        num_blocks, max_model_len = pick_num_blocks(
            self.loaded.config,
            pick_kv_dtype(self.loaded, kv_cache_dtype),
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            memory_fraction=memory_fraction,
            devices=tensor_parallel_size,
        )
        self.config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            window=find_window(self.loaded.config),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_steps=decode_steps,
            watermark=watermark,
            async_scheduling=async_scheduling,
            enable_prefix_caching=enable_prefix_caching,
            preemption=preemption,
            swap_space_bytes=gib_to_bytes("swap_space", swap_space),
            prefix_cache_host_bytes=prefix_cache_host_bytes,
            prefix_cache_dir=None if prefix_cache_dir is None else str(prefix_cache_dir),
            prefix_cache_disk_bytes=prefix_cache_disk_bytes,
            attention_backend=attention_backend,
            linear_backend=linear_backend,
            tensor_parallel_size=tensor_parallel_size,
            max_logprobs=max_logprobs,
            max_logit_bias=max_logit_bias,
            max_bad_words=max_bad_words,
            max_bad_word_tokens=max_bad_word_tokens,
            logits_processor=logits_processor,
            processor_args=processor_args or {},
            free_padding=linear == "cpu",
            kv_cache_dtype=kv_cache_dtype,
        )
        self.loaded = self.loaded.with_max_length(max_model_len)
        if linear == "cpu":
            # What was loaded here is nobody else's: it need not stay in memory twice.
            mine = not isinstance(model, LoadedModel)
            self.loaded = pack_model(self.loaded, quantization=quantization, consume=mine)
        self.engine = Engine(
            self.loaded, self.config, seed=seed, scheduling_policy=scheduling_policy, eviction_policy=eviction_policy
        )
        self._ids = itertools.count()
        if warm_up:
            self.warm_up(progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        on_error: str = "raise",
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of the prompts.

        sampling_params: one for all, one each, or None for the checkpoint's own defaults.
        priority: one for each prompt, lower ones go first, under a scheduling policy that looks at it; by default those
        of the sampling parameters.
        on_error: "raise" checks all prompts before anything runs and raises ValueError for the first bad one;
        "return" runs the good ones and returns the bad with finish_reason "error" and the reason in `.error`.
        """
        items = cast(list[Prompt], [prompts] if _is_single(prompts) else list(prompts))
        if priority is not None and len(priority) != len(items):
            raise ValueError(f"{len(priority)} priorities for {len(items)} prompts: give one for each")
        return self._run([(item, None) for item in items], sampling_params, use_tqdm, on_error, priority)

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Continue every prompt; an output each time one got tokens, in the form its `output_kind` asks for.

        Prompts are told apart by `request_id`: numbers that go up in the order of the prompts. The first bad prompt
        raises ValueError before anything runs. Leaving the iterator early ends what is running.
        """
        items = cast(list[Prompt], [prompts] if _is_single(prompts) else list(prompts))
        order = self._add([(item, None) for item in items], self._params_for(sampling_params, len(items)))
        streams = {request_id: OutputStream(self.tokenizer) for request_id in order}
        with self._aborting(order):
            while any(request_id in self.engine.requests for request_id in order):
                touched: dict[str, list[Request]] = {}
                for request in self.engine.step():
                    touched.setdefault(request.request_id, []).append(request)
                for request_id, requests in touched.items():
                    output = streams[request_id].next(requests) if request_id in streams else None
                    if output is not None:
                        yield output
        while not self.engine.requests and self.engine.has_unfinished():  # blocks go back now, not with the next prompt
            self.engine.step()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        on_error: str = "raise",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, given as lists of {"role": …, "content": …} messages.

        add_generation_prompt   begin a turn of the assistant
        continue_final_message  go on with the last message instead (with add_generation_prompt=False)
        tools                   functions the model may call, as JSON schemas; what the template makes of them
        chat_template           Jinja source in place of the checkpoint's; rendered in a sandbox
        chat_template_kwargs    further variables of the template, for example {"enable_thinking": False}

        Raises ValueError for a conversation that the template refuses.
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError("messages must be a conversation (a list of message dicts) or a list of conversations")
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        items: list[tuple[Prompt, str | None]] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            items.append((tokenizer.encode(text, add_special_tokens=False), text))
        return self._run(items, sampling_params, use_tqdm, on_error)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most likely continuations of every prompt that a search with `params.beam_width` beams finds.

        All checked before anything runs: ValueError for the first bad prompt, and for a group that could not finish.
        """
        items = cast(list[Prompt], [prompts] if _is_single(prompts) else list(prompts))
        order = [str(next(self._ids)) for _ in items]
        requests: list[Request] = []
        with self._aborting(order):
            for index, (request_id, item) in enumerate(zip(order, items, strict=True)):
                try:
                    ids, text = self._tokenize(item, None, SamplingParams())
                    salt = _salt_of(item)
                    requests.append(
                        self.engine.add_request(request_id, ids, prompt=text, cache_salt=salt, beams=params)
                    )
                except ValueError as error:
                    raise ValueError(f"prompt {index}: {error}") from error
            while self.engine.has_unfinished():
                self.engine.step()
        return [self._to_beam_output(request) for request in requests]

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this model came without a tokenizer: pass tokenizer=, or prompt it with token ids")
        return self.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends (generation_config.json), SamplingParams' own defaults for the rest."""
        found = self.loaded.generation
        if found.do_sample is False:
            return SamplingParams(temperature=0.0, repetition_penalty=found.repetition_penalty or 1.0)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(found, name) for name in names if getattr(found, name) is not None}
        return SamplingParams(**given)

    def stats(self) -> EngineStats:
        """What the engine did so far and how full its memory is."""
        return self.engine.stats()

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Compute the full blocks of a prompt, unless they are cached, and keep them until `unpin_prefix`.

        For a text that many prompts will begin with. `num_tokens` of the result says how many tokens are kept. Raises
        ValueError for a bad prompt, and where the blocks left over could no longer hold a sequence of max_model_len.
        """
        ids, _ = self._tokenize(prompt, None, SamplingParams())
        self.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        return self.engine.pin_prefix(ids, cache_salt=_salt_of(prompt))

    def unpin_prefix(self, pinned: PinnedPrefix) -> None:
        """Let the blocks of a pinned prefix be evicted again."""
        self.engine.unpin_prefix(pinned)

    def save_prefix_cache(self) -> int:
        """Write to `prefix_cache_dir` what is cached now, for a later process. Returns the number of blocks in it.

        Raises ValueError if there is no such folder, or what is in it is of another model and so not in use.
        """
        return self.engine.save_prefix_cache()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, in host memory and files too, and every pin. Returns False if running sequences
        still use some."""
        return self.engine.reset_prefix_cache()

    def warm_up(self, progress: bool = False) -> None:
        """Compile every program; after this, no request compiles anything."""
        total = len(self.config.decode_buckets) + len(self.config.token_buckets)
        with tqdm(total=total, desc="Compiling", unit="program", disable=not progress, leave=False) as bar:

            def show(name: str) -> None:
                bar.set_postfix_str(name)
                bar.update()

            self.engine.warm_up(show)

    # ------------------------------------------------------------------ the parts of a call

    def _run(
        self,
        items: list[tuple[Prompt, str | None]],
        sampling_params: Params,
        use_tqdm: bool,
        on_error: str,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if on_error not in ("raise", "return"):
            raise ValueError(f'on_error must be "raise" or "return", got {on_error!r}')
        params = self._params_for(sampling_params, len(items))
        outputs: dict[str, RequestOutput] = {}
        order = self._add(items, params, outputs if on_error == "return" else None, priority)
        with self._aborting(order):
            self._drain(set(order) - set(outputs), outputs, use_tqdm)
        return [outputs[request_id] for request_id in order]

    def _add(
        self,
        items: list[tuple[Prompt, str | None]],
        params: list[SamplingParams],
        refused: dict[str, RequestOutput] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue prompts; the ids of their requests. Bad ones go to `refused` with the reason, or without it raise.

        Nothing runs before all are queued: a bad prompt is found before any work is done for the others.
        """
        order = [str(next(self._ids)) for _ in items]
        with self._aborting(order):
            for index, (request_id, (item, text), each) in enumerate(zip(order, items, params, strict=True)):
                salt, rank = _salt_of(item), None if priority is None else int(priority[index])
                try:
                    ids, text = self._tokenize(item, text, each)
                    self.engine.add_request(request_id, ids, each, prompt=text, cache_salt=salt, priority=rank)
                except ValueError as error:
                    if refused is None:
                        raise ValueError(f"prompt {index}: {error}") from error
                    refused[request_id] = make_refusal(request_id, text, str(error))
        return order

    @contextlib.contextmanager
    def _aborting(self, order: list[str]) -> Iterator[None]:
        """A refused or interrupted call leaves the engine empty for the next one."""
        try:
            yield
        except BaseException:
            for request_id in order:
                self.engine.abort(request_id)
            raise

    def _drain(self, expected: set[str], outputs: dict[str, RequestOutput], use_tqdm: bool) -> None:
        tokens = 0
        with tqdm(total=len(expected), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished():
                for request in self.engine.step():
                    request_id = request.request_id
                    if request.group_finished and request_id in expected and request_id not in outputs:
                        outputs[request_id] = self._to_output(request)
                        tokens += sum(len(each.output_token_ids) for each in request.group)
                        rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
                        bar.update()

    def _params_for(self, sampling_params: Params, count: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        params = list(sampling_params)
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one each")
        for each in params:
            if not isinstance(each, SamplingParams):
                raise ValueError(f"sampling_params must hold SamplingParams, got {type(each).__name__}")
        return params

    def _tokenize(self, item: Prompt, text: str | None, params: SamplingParams) -> tuple[Sequence[int], str | None]:
        """(token ids, text) of a prompt, cut as `truncate_prompt_tokens` asks."""
        if isinstance(item, Mapping):
            if "prompt_token_ids" in item:
                found, text = item["prompt_token_ids"], item.get("prompt")
            elif "prompt" in item:
                found = item["prompt"]
            else:
                raise ValueError(f'a prompt dict needs "prompt" or "prompt_token_ids", got keys {sorted(item)}')
        else:
            found = item
        ids: Sequence[int]
        if isinstance(found, str):
            if not found:
                raise ValueError("the prompt is empty: give at least one character or token id")
            ids, text = self.get_tokenizer().encode(found), found
        else:
            ids = found
        keep = params.truncate_prompt_tokens
        if keep is not None:
            ids = ids[-(keep if keep > 0 else self.config.max_model_len - 1) :]
        return ids, text

    def _to_beam_output(self, request: Request) -> BeamSearchOutput:
        assert request.beams is not None
        sequences, params = [], request.beams.params
        for score, beam, reason in request.beams.finished:
            tokens = [*request.prompt_token_ids, *beam.tokens()]
            text = ""
            if self.tokenizer is not None:
                hidden = reason == "stop" and not params.include_stop_str_in_output
                shown = tokens[: len(tokens) - hidden]
                text = self.tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
            sequences.append(BeamSearchSequence(tokens, text, beam.cum_logprob, score, reason))
        return BeamSearchOutput(sequences)

    def _to_output(self, request: Request) -> RequestOutput:
        """All outputs of the request's prompt."""
        completions = [make_completion(each, self.tokenizer) for each in request.group]
        return make_output(request.group[0], completions, self.tokenizer)


def _salt_of(item: Prompt) -> str | None:
    return item.get("cache_salt") if isinstance(item, Mapping) else None


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, a dict, or a flat sequence of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and all(isinstance(token, int) or hasattr(token, "__index__") for token in prompts)


def _check_loaded(loaded: LoadedModel, dtype: str, tokenizer: str | Path | Tokenizer | None) -> None:
    """Refuse options that are for loading: a LoadedModel has been loaded, and they would change nothing."""
    has = loaded.dtype.name
    if dtype not in ("auto", has):
        raise ValueError(
            f'dtype {dtype!r} was given with a LoadedModel of {has}; allowed: "auto" or {has!r}, or load it again '
            f"with load_model(path, dtype={dtype!r})"
        )
    if tokenizer is not None and tokenizer is not loaded.tokenizer:
        raise ValueError(
            f"tokenizer {tokenizer!r} was given with a LoadedModel; allowed: None or the model's own (another one: "
            "load_model(path, tokenizer=…) or dataclasses.replace(loaded, tokenizer=…))"
        )
