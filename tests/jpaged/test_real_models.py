"""Real checkpoints, end to end: the engine's greedy tokens equal transformers' over 128 tokens."""

import json

import pytest

from jpaged import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)


def check_goldens(llm: LLM, goldens: list[dict]) -> None:
    """All prompts at once. The goldens' top-2 gaps are far above float noise, so tokens must be equal."""
    assert min(gap for golden in goldens for gap in golden["gaps"]) > 1e-4
    outputs = llm.generate([golden["prompt_token_ids"] for golden in goldens], GREEDY, use_tqdm=False)
    for output, golden in zip(outputs, goldens, strict=True):
        assert output.outputs[0].token_ids == golden["token_ids"]
    assert llm.stats().blocks.used == 0


@pytest.fixture(scope="module")
def stories(shared):
    return shared / "models" / "stories260k"


@pytest.mark.parametrize("sizes", [dict(max_num_batched_tokens=32), dict(max_num_seqs=1, num_blocks=30)], ids=str)
def test_stories260k(stories, root, sizes):
    goldens = json.loads((root / "tests/goldens/greedy_stories260k.json").read_text())["prompts"]
    base = dict(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=32)
    llm = LLM(stories, dtype="float32", warm_up=False, **{**base, **sizes})
    check_goldens(llm, goldens)
    text = llm.generate(goldens[0]["prompt"], GREEDY, use_tqdm=False)[0]
    assert text.prompt_token_ids == goldens[0]["prompt_token_ids"]
    assert text.outputs[0].token_ids == goldens[0]["token_ids"]
    assert text.outputs[0].text.startswith(", there was a")


def test_smollm2(demo_model, root):
    goldens = json.loads((root / "tests/goldens/greedy_smollm2.json").read_text())["prompts"]
    llm = LLM(demo_model, dtype="float32", warm_up=False, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)
    check_goldens(llm, goldens)
    (chat,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], GREEDY, use_tqdm=False)
    assert "4" in chat.outputs[0].text


def check_logprobs(llm: LLM, goldens: list[dict]) -> None:
    """Prompt and output tokens, ranks and the five likeliest, within 1e-4 of transformers'."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=len(golden["token_ids"]) - golden["prompt_length"],
            ignore_eos=True,
            logprobs=5,
            prompt_logprobs=5,
        )
        for golden in goldens
    ]
    prompts = [golden["token_ids"][: golden["prompt_length"]] for golden in goldens]
    for output, golden in zip(llm.generate(prompts, params, use_tqdm=False), goldens, strict=True):
        assert output.prompt_token_ids + output.outputs[0].token_ids == golden["token_ids"]
        found = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        for i, entries in enumerate(found):
            own = entries[golden["token_ids"][i + 1]]
            assert abs(own.logprob - golden["logprobs"][i]) < 1e-4 and own.rank == golden["ranks"][i]
            for token, value in zip(golden["top_ids"][i], golden["top_logprobs"][i], strict=True):
                assert abs(entries[token].logprob - value) < 1e-4


def test_logprobs_of_stories260k(stories, root):
    goldens = json.loads((root / "tests/goldens/logprobs_stories260k.json").read_text())
    llm = LLM(stories, dtype="float32", warm_up=False, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=8)
    check_logprobs(llm, goldens)


def test_logprobs_of_smollm2(demo_model, root):
    goldens = json.loads((root / "tests/goldens/logprobs_smollm2.json").read_text())
    llm = LLM(demo_model, dtype="float32", warm_up=False, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32)
    check_logprobs(llm, goldens)
