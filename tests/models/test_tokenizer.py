"""Tokenizers of folders and GGUF files, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from jpaged_models import CheckpointError, Tokenizer, load_tokenizer
from jpaged_models.chat_template import ChatTemplateError, compile_template, cut_after_final_message
from jpaged_models.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "Hello, world!",
    "two  spaces   three",
    " lead and trail ",
    "1234567 3.14 12 345",
    "don't I'VE they'd we'll",
    "naïve cafe\u0301 café",
    "日本語 中文 Привет",
    "😀 👩‍👩‍👧",
    "a\n\nb\r\n\tc\n",
    "x**2; y!=z && (w)",
    "<|end|>in<|end|>the middle",
    "",
    "   ",
]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ("cat", "dog", "house", "river", "sea", "stone")
CORPUS = [*TEXTS, *(f"The {word} of 12{i}4 don't\n\n" for i, word in enumerate(WORDS))] * 4


@pytest.fixture(scope="module")
def golden(root: Path) -> dict[str, Any]:
    return json.loads((root / "tests/goldens/tokenizer_smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2(demo_model: Path) -> Tokenizer:
    return load_tokenizer(demo_model)


def test_smollm2_from_gguf_equals_transformers(golden: dict[str, Any], smollm2: Tokenizer) -> None:
    for entry in golden["texts"]:
        assert smollm2.encode(entry["text"]) == entry["ids"], entry["text"]
        assert smollm2.decode(entry["ids"]) == entry["decoded"]
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2,))


def test_smollm2_chats_equal_transformers(golden: dict[str, Any], smollm2: Tokenizer) -> None:
    for chat in golden["chats"]:
        assert smollm2.apply_chat_template(chat["messages"]) == chat["text"]
        plain = smollm2.apply_chat_template(chat["messages"], add_generation_prompt=False)
        assert plain == chat["without_prompt"]


def test_special_tokens_in_text_and_out(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False)
    assert ids[0] == 1 and ids[-1] == 2
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


# What each name in tokenizer.ggml.pre stands for, built with the library's own parts
PRE: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: split_on(r"\p{N}{1,3}"),
    "qwen2": lambda: split_on(r"\p{N}"),
}


def split_on(digits: str) -> Any:
    pattern = tokenizers.Regex(SPLIT % digits)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_bpe_from_gguf(pre: str) -> None:
    """A tokenizer trained on the spot, taken apart as a GGUF file holds it, and put together again."""
    reference = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    reference.pre_tokenizer, reference.decoder = PRE[pre](), decoders.ByteLevel()
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    reference.train_from_iterator(CORPUS, trainer)
    model = json.loads(reference.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*vocab, "[PAD]"],
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(vocab) - 2) + [5], np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    built = gguf_tokenizer(metadata)
    assert built is not None
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert built.encode(text, add_special_tokens=False) == ids, text
        assert built.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)
    # only Llama 3 adds BOS unless the file says so
    assert built.encode("a")[:-1] == ([0] if pre == "llama-bpe" else [])
    explicit = gguf_tokenizer({**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert explicit is not None
    assert explicit.encode("a") == [0, *built.encode("a", add_special_tokens=False), 1]
    assert built.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert built.apply_chat_template([{"role": "user", "content": "x"}]) == "x"


def test_sentencepiece_bpe_from_gguf(shared: Path) -> None:
    """stories260K's vocabulary: its tokenizer.json was made from the SentencePiece scores that GGUF stores."""
    folder = shared / "models" / "stories260k"
    reference = Tokenizer.from_folder(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    best: dict[str, float] = {}
    for rank, (a, b) in enumerate(model["merges"]):
        best.setdefault(a + b, -float(rank))
    types = [2, 3, 3] + [6 if t.startswith("<0x") else 1 for t in vocab[3:]]
    built = gguf_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": vocab,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": [best.get(token, -1e6) for token in vocab],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    assert built is not None
    for text in [*TEXTS, "Once upon a time, there was a little girl named Lily."]:
        ids = reference.encode(text)
        assert ids[0] == 1
        assert built.encode(text) == ids, text
        assert built.decode(ids) == reference.decode(ids)
        assert built.decode(ids) == text  # bytes fill in for what the vocabulary lacks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "model 'bert' is not supported; allowed: gpt2, llama"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported; allowed: gpt-2, default, llama-bpe"),
        ({"tokenizer.ggml.pre": None}, "None is not supported"),
        ({"tokenizer.ggml.tokens": []}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "2 tokens but 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 7}, "eos_token_id is 7, of 2 tokens"),
        ({"tokenizer.ggml.merges": ["a z"]}, "GGUF tokenizer is damaged"),
        ({"tokenizer.ggml.model": "llama"}, "needs tokenizer.ggml.scores"),
    ],
)
def test_damaged_gguf_tokenizers_are_named(changes: dict[str, Any], message: str) -> None:
    sound = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [1, 1],
        "tokenizer.ggml.merges": [],
    }
    assert gguf_tokenizer(sound) is not None
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer({**sound, **changes})


def test_names_of_pre_tokenizers_tested_are_all() -> None:
    """The other names are aliases of the four tested above."""
    assert {id(rules) for rules in PRE_TOKENIZERS.values()} == {id(PRE_TOKENIZERS[name]) for name in PRE}


def small_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    backend = tokenizers.Tokenizer(models.WordLevel({"hi": 0, "</s>": 1, "there": 2}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(1)  # saved with the tokenizer, and never wanted
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D {{ bos_token }}"}]
    config = {"eos_token": {"content": "</s>"}, "bos_token": "hi", "pad_token": None, "chat_template": templates}
    found = Tokenizer.from_folder(small_folder(tmp_path, config))
    assert found.encode("hi there") == [0, 2]
    assert (found.eos_token_ids, found.bos_token_id, found.vocab_size) == ((1,), 0, 3)
    assert found.apply_chat_template([{"role": "user"}]) == "D hi"
    (tmp_path / "chat_template.jinja").write_text("J {{ eos_token }}")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user"}]) == "J </s>"
    with pytest.raises(ValueError, match="text to encode must be a str, got int"):
        found.encode(3)  # type: ignore[arg-type]


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    small_folder(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == ()
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": ""}])
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is damaged"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{% for m in messages %}\n{{ m['content'] }}\n{% endfor %}", "é<&\n"),  # block lines leave no line behind
        ("  {% if true %}x{% endif %}", "x"),  # nor their indentation
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<&"}]'),  # no HTML escapes
        ("{{ messages | tojson(indent=1) }}", '[\n {\n  "role": "user",\n  "content": "é<&"\n }\n]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ x }}{% endgeneration %}", "a5"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ unknown is defined }}", "TrueFalse"),
    ],
)
def test_templates_render_as_in_transformers(template: str, want: str) -> None:
    messages = [{"role": "user", "content": "é<&"}]
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    assert Tokenizer(backend).apply_chat_template(messages, chat_template=template, x=5) == want


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "does not parse"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),  # the sandbox keeps what it is given
        ("{{ ''.__class__.__mro__ }}", "refused the messages"),
    ],
)
def test_bad_templates_are_named(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        compile_template(template)([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [{"content": "x"}], None])
def test_bad_messages_are_named(messages: Any) -> None:
    with pytest.raises(ValueError, match="message"):
        compile_template("x")(messages)


@pytest.mark.parametrize(
    ("text", "content", "want"),
    [
        ("<u>hi</u><a>Sure, </a>", "Sure, ", "<u>hi</u><a>Sure, "),  # the template keeps the space
        ("<u>hi</u><a>Sure,</a>", "Sure, ", "<u>hi</u><a>Sure,"),  # or trims it
        ("<u>x</u><a>x</a>", " x", "<u>x</u><a>x"),  # the last place it is at
        ("<a>one two</a>", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "<a>one two"),
    ],
)
def test_cut_after_the_final_message(text: str, content: Any, want: str) -> None:
    assert cut_after_final_message(text, [{"role": "assistant", "content": content}]) == want


@pytest.mark.parametrize("content", ["gone", "  ", None, [{"type": "image"}]])
def test_a_final_message_that_is_not_in_the_text(content: Any) -> None:
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        cut_after_final_message("<a>here</a>", [{"role": "assistant", "content": content}])
