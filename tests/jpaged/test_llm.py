"""The Python interface on a tiny model with a tiny tokenizer."""

import dataclasses

import numpy as np
import pytest
from jpaged_models import ConfigError, GenerationDefaults
from tiny import SIZES, greedy_reference, tiny_model, word_tokenizer

from jpaged import LLM, SamplingParams
from jpaged.memory import block_bytes, pick_num_blocks

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    loaded = dataclasses.replace(tiny_model(), tokenizer=word_tokenizer())
    return LLM(loaded, warm_up=False, **SIZES)


def test_generate_keeps_the_order_and_takes_every_kind_of_prompt(llm):
    prompts = ["w5 w6 w7", [8, 9], {"prompt": "w10"}, {"prompt_token_ids": [11, 12], "prompt": "as given"}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    ids = [[5, 6, 7], [8, 9], [10], [11, 12]]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["w5 w6 w7", None, "w10", "as given"]
    assert [output.outputs[0].token_ids for output in outputs] == [greedy_reference(prompt, 6) for prompt in ids]
    assert all(output.finished and output.error is None for output in outputs)
    assert len({output.request_id for output in outputs}) == 4
    for output in outputs:
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
        assert metrics.first_token_time <= metrics.last_token_time == metrics.finished_time
        assert metrics.time_in_queue >= 0 and output.num_cached_tokens == 0
        assert output.outputs[0].finished() and output.outputs[0].index == 0


@pytest.mark.parametrize("prompt", ["w5 w6", [5, 6], np.array([5, 6]), {"prompt": "w5 w6"}], ids=type)
def test_one_prompt_gives_one_output(llm, prompt):
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy_reference([5, 6], 6)


def test_prefix_cache_salt_pin_and_reset():
    llm = LLM(dataclasses.replace(tiny_model(), tokenizer=word_tokenizer()), warm_up=False, **SIZES)
    text = " ".join(f"w{i}" for i in range(30, 41))
    hits = [0]
    for prompt in (text, text, {"prompt": text, "cache_salt": "a"}, {"prompt": text, "cache_salt": "a"}):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy_reference(list(range(30, 41)), 6)
        hits.append(llm.stats().prefix_cache.hit_tokens)
    assert np.diff(hits).tolist() == [0, 8, 0, 8]
    pinned = llm.pin_prefix({"prompt": text, "cache_salt": "a"})
    assert pinned.num_tokens == 8 and llm.stats().prefix_cache.pinned_blocks == 2
    llm.unpin_prefix(pinned)
    assert llm.pin_prefix("w50 w51 w52 w53").num_tokens == 4
    assert llm.reset_prefix_cache()
    stats = llm.stats()
    assert stats.prefix_cache.pinned_blocks == 0 and stats.blocks.free == stats.blocks.total


def test_swap_space_is_in_gib_and_checked():
    llm = LLM(tiny_model(), warm_up=False, swap_space=0.5, preemption="swap", **SIZES)
    assert llm.config.swap_space_bytes == 1 << 29
    for bad in (-1, float("nan"), float("inf"), "4"):
        with pytest.raises(ValueError, match="swap_space must be"):
            LLM(tiny_model(), warm_up=False, swap_space=bad, **SIZES)


def test_priority_decides_who_is_served_first():
    llm = LLM(tiny_model(), warm_up=False, scheduling_policy="priority", **{**SIZES, "max_num_seqs": 1})
    outputs = llm.generate([[5], [6], [7]], GREEDY, use_tqdm=False, priority=[2, 1, 0])
    started = [output.metrics.first_scheduled_time for output in outputs]
    assert started == sorted(started, reverse=True)
    with pytest.raises(ValueError, match="2 priorities for 1 prompts"):
        llm.generate([[5]], GREEDY, use_tqdm=False, priority=[1, 2])


def test_text_is_the_tokens_without_the_one_that_ended_it(llm):
    path = greedy_reference([5, 6], 6)
    (output,) = llm.generate("w5 w6", dataclasses.replace(GREEDY, stop_token_ids=(path[3],)), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason == path[3]
    length = path.index(path[3])
    assert completion.token_ids == path[: length + 1]
    assert completion.text == "".join(f" w{token}" for token in path[:length] if token != 2)


def test_params_one_each(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (1, 3)]
    outputs = llm.generate(["w5", "w6"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["w5", "w6"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="must hold SamplingParams, got dict"):
        llm.generate(["w5"], [{"max_tokens": 3}], use_tqdm=False)


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 1: the prompt is empty"),
        ([], "prompt 1: a prompt must hold at least one token id"),
        ([5, 97], "prompt 1: token id 97 is outside the model's vocabulary: ids are 0 to 96"),
        ([-1], "prompt 1: token id -1"),
        ([5] * 128, "prompt 1: the prompt has 128 tokens, but max_model_len is 128"),
        ({"text": "w5"}, r"prompt 1: a prompt dict needs .* got keys \['text'\]"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm, prompt, message):
    steps = llm.stats().steps
    with pytest.raises(ValueError, match=message):
        llm.generate(["w5", prompt], GREEDY, use_tqdm=False)
    assert llm.stats().steps == steps and not llm.engine.has_unfinished()


def test_a_bad_prompt_may_be_returned_and_the_others_run(llm):
    outputs = llm.generate(["w5", [5, 97], "w6"], GREEDY, use_tqdm=False, on_error="return")
    assert outputs[1].outputs[0].finish_reason == "error" and "97 is outside" in outputs[1].error
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [greedy_reference([n], 6) for n in (5, 6)]
    with pytest.raises(ValueError, match=r'on_error must be "raise" or "return", got \'ignore\''):
        llm.generate(["w5"], GREEDY, on_error="ignore")


def test_chat(llm):
    conversations = [[{"role": "user", "content": "w5 w6"}], [{"role": "user", "content": "w7"}]]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[1, 5, 6, 2], [1, 7, 2]]
    (single,) = llm.chat(conversations[0], GREEDY, use_tqdm=False)
    assert single.outputs == outputs[0].outputs
    (bare,) = llm.chat(conversations[1], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt_token_ids == [1, 7]
    for bad in ([], "hello"):
        with pytest.raises(ValueError, match="messages must be a conversation"):
            llm.chat(bad, GREEDY)


def test_chat_with_tools_and_template_variables(llm):
    template = "w1 {% for t in tools %}w{{ t.number }} {% endfor %}{{ word }} {{ messages[-1].content }} w9 w10"
    options = dict(use_tqdm=False, chat_template=template, chat_template_kwargs={"word": "w7"})
    message = [{"role": "user", "content": "w5 w6"}]
    (output,) = llm.chat(message, GREEDY, tools=[{"number": 30}, {"number": 31}], **options)
    assert output.prompt_token_ids == [1, 30, 31, 7, 5, 6, 9, 10]
    (continued,) = llm.chat(
        message, GREEDY, tools=[], add_generation_prompt=False, continue_final_message=True, **options
    )
    assert continued.prompt_token_ids == [1, 7, 5, 6]
    with pytest.raises(ValueError, match="continue_final_message must be used with add_generation_prompt=False"):
        llm.chat(message, GREEDY, tools=[], continue_final_message=True, **options)
    with pytest.raises(ValueError, match="refused the messages: access to attribute '__class__'"):
        llm.chat(message, GREEDY, chat_template="{{ messages.__class__.__mro__ }}")


def test_interrupted_call_leaves_the_engine_empty(llm, monkeypatch):
    step = llm.engine.step

    def interrupted():
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["w5", "w6"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    (output,) = llm.generate(["w7"], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy_reference([7], 6)
    assert llm.stats().blocks.used == 0


def test_without_a_tokenizer_only_token_ids_work():
    llm = LLM(tiny_model(), warm_up=False, **SIZES)
    with pytest.raises(ValueError, match="came without a tokenizer"):
        llm.generate("w5", GREEDY)
    (output,) = llm.generate([5], GREEDY, use_tqdm=False)
    assert output.outputs[0].text == ""


def test_defaults_come_from_the_checkpoint():
    loaded = dataclasses.replace(tiny_model(), generation=GenerationDefaults(temperature=0.3, top_k=4))
    params = LLM(loaded, warm_up=False, **SIZES).default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 4, 1.0)
    greedy = dataclasses.replace(loaded, generation=GenerationDefaults(do_sample=False, temperature=0.3))
    assert LLM(greedy, warm_up=False, **SIZES).default_sampling_params().temperature == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(block_size=0), "block_size must be at least 1"),
        (dict(max_model_len=1000), "max_model_len=1000 is more than the 256 positions"),
        (dict(num_blocks=9), "cannot hold one sequence of max_model_len=128"),
        (dict(max_num_batched_tokens=4), "max_num_batched_tokens must be at least max_num_seqs"),
        (dict(watermark=1.5), r"watermark must be in \[0, 1\)"),
        (dict(memory_fraction=0.0), r"memory_fraction must be in \(0, 1\]"),
        (dict(kv_cache_memory_bytes=100, num_blocks=None), "no room for KV blocks"),
        (dict(attention_backend="fast"), "backend"),
    ],
)
def test_settings_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_model(), warm_up=False, **{**SIZES, **changes}).generate([5], GREEDY, use_tqdm=False)


def test_options_that_a_loaded_model_cannot_follow_are_refused():
    loaded = dataclasses.replace(tiny_model(), tokenizer=word_tokenizer())
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(
            ValueError, match=f'dtype {dtype!r} was given with a LoadedModel of float32; allowed: "auto"'
        ):
            LLM(loaded, dtype=dtype, warm_up=False, **SIZES)
    for tokenizer in ("some/folder", word_tokenizer()):
        with pytest.raises(
            ValueError, match=r"tokenizer .* was given with a LoadedModel; allowed: None or the model's own"
        ):
            LLM(loaded, tokenizer=tokenizer, warm_up=False, **SIZES)
    llm = LLM(loaded, dtype="float32", tokenizer=loaded.tokenizer, warm_up=False, **SIZES)
    assert llm.get_tokenizer() is loaded.tokenizer


def test_unknown_model_type(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt-neo"}')
    with pytest.raises(ConfigError, match="gpt-neo"):
        LLM(tmp_path)


def test_pool_size_from_bytes_and_from_what_is_of_use():
    config = tiny_model().config
    sizes = dict(
        block_size=4,
        max_model_len=None,
        max_num_seqs=2,
        num_blocks=None,
        kv_cache_memory_bytes=None,
        memory_fraction=0.5,
    )
    per_block = block_bytes(config, 4, "float32")
    assert per_block == 2 * 2 * 2 * 4 * 8 * 4
    assert block_bytes(config, 4, "bfloat16") == block_bytes(config, 4, "float16") == per_block // 2
    scales = 2 * 2 * 2 * 4 * 4  # float32, one for each K and V, layer, head and token
    assert block_bytes(config, 4, "int8") == block_bytes(config, 4, "fp8") == per_block // 4 + scales
    # More than two sequences of the model's 256 positions can use is not taken.
    assert pick_num_blocks(config, "float32", **sizes) == (2 * 64 + 1, 256)
    ten = {**sizes, "kv_cache_memory_bytes": 10 * per_block}
    assert pick_num_blocks(config, "float32", **ten) == (10, 36)
