"""The turn format, and the way from characters to the tokens that were sampled."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mempo.tags import parse_turn, spans_from_marks, token_offsets, token_span

TURN = "<mem>已解答。</mem><think>a</think><search>b</search>"
CORPUS = [
    TURN,
    "</mem><think>x</think><search>Reed College</search>",
    "</mem><think>y</think><answer>里德学院。</answer>",
    "<mem>Ulm.</mem>\n<think>Apple Inc.</think>\n<answer>\nUlm\n</answer>",
] * 30


@pytest.fixture(scope="module")
def byte_level() -> Any:
    """Byte-level BPE that does not split at punctuation, so that edges of tags merge with their neighbours."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Without the limit whole lines would become single tokens.
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, max_token_length=5, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def edge_merges() -> Any:
    """Byte-level BPE of nothing but the merges that cross edges: ``><``, ``></`` and ``。</``."""
    full_stop = "ãĢĤ"  # the three bytes of 。 as byte-level characters
    pairs = [(">", "<"), ("><", "/"), ("<", "/"), ("ã", "Ģ"), ("ãĢ", "Ĥ"), (full_stop, "</")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """SentencePiece's form: words with a leading blank that a decoder strips, bytes as ``<0xE4>``."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Ulm",
        "▁is",
        "<",
        ">",
        "</",
        "mem",
        "▁<",
        "中",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def brute_force(tokenizer: Any, ids: list[int]) -> list[tuple[int, int]]:
    """Offsets from the decoded text of every prefix: quadratic, and right by its shortness."""

    def complete(count: int) -> int:
        return len(tokenizer.decode(ids[:count]).rstrip("\ufffd"))

    broken = [tokenizer.decode(ids[: i + 1]).endswith("\ufffd") for i in range(len(ids))]
    return [(complete(i), complete(i + 1) + broken[i]) for i in range(len(ids))]


# ---------------------------------------------------------------- parse_turn


@pytest.mark.parametrize(
    "text",
    [
        "<mem>x <answer>Paris</answer>",  # sampling stops here, before the </mem> that would come
        "<mem>x <answer>Paris</answer></mem><think>a</think>",
        "<think>I could write <answer>Paris</answer>",
        "<think>a</think><information><answer>Paris</answer></information>",
    ],
)
def test_what_stands_inside_a_block_is_no_action_whether_or_not_the_block_was_closed(text: str) -> None:
    parsed = parse_turn(text, 2)
    assert (parsed.valid, parsed.action, parsed.argument) == (False, None, None)


def test_a_segment_or_answer_that_was_cut_off_is_dropped() -> None:
    assert parse_turn("<mem>half <think>a</think><search>b</search>", 2).memory is None
    assert parse_turn("<mem>x</mem><think>a</think><answer>Ulm</ans", 2).action is None


def test_the_second_action_is_taken_where_the_first_is_empty() -> None:
    parsed = parse_turn("<think>a</think><search> </search><answer>Ulm</answer>", 1)
    assert (parsed.valid, parsed.action, parsed.argument) == (False, "answer", "Ulm")


def test_memory_is_optional_where_the_format_does_not_require_it() -> None:
    text = "<think>a</think><search>b</search>"
    assert [parse_turn(text, turn).valid for turn in (1, 2)] == [True, False]
    assert parse_turn(text, 2, require_memory=False).valid


def test_taking_a_chat_marker_out_does_not_make_another() -> None:
    parsed = parse_turn("<think>a</think><search>x<|im<|im_end|>_end|></search>", 1)
    assert not parsed.valid
    assert parsed.argument == "x<|im _end|>"


@pytest.mark.parametrize("marker", ["<|im_start|>", "<|eot_id|>", "<｜User｜>", "<end_of_turn>"])
def test_chat_markers_of_the_known_families_make_a_turn_invalid(marker: str) -> None:
    parsed = parse_turn(f"<think>a</think><answer>Ulm{marker}</answer>", 1)
    assert (parsed.valid, parsed.argument) == (False, "Ulm")


def test_memory_text_is_kept_to_the_character() -> None:
    parsed = parse_turn("\n<mem>\n Ulm \n</mem><think>a</think><answer>b</answer>", 2)
    assert parsed.memory == "\n Ulm \n"
    assert parsed.memory_chars == (1, 19)  # after the line end: 5 + 7 + 6 characters


def test_importing_tags_imports_no_heavy_library() -> None:
    code = "import sys, mempo.tags; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------- spans


def test_token_span_takes_every_token_that_overlaps() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 6), (5, 6), (6, 9)]
    assert token_span(offsets, (2, 5)) == (1, 2)
    assert token_span(offsets, (4, 6)) == (1, 5)  # both tokens that share character 5
    assert token_span(offsets, (1, 7)) == (0, 6)
    assert token_span(offsets, (9, 9)) == (6, 6)


def test_spans_from_marks() -> None:
    assert spans_from_marks([0, 1, 0, 2, 1, 2, 0]) == [(1, 4), (4, 6)]
    assert spans_from_marks([1, 2, 0, 1, 0]) == [(0, 2)]  # the second segment was cut off
    assert spans_from_marks([0, 0]) == []


@pytest.mark.parametrize("marks", [[2], [2, 1], [1, 1, 1, 2], [1, 2, 2], [1, 1, 2, 2]])
def test_marks_that_do_not_pair_up_are_refused(marks: list[int]) -> None:
    with pytest.raises(ValueError, match="do not pair up"):
        spans_from_marks(marks)


# ---------------------------------------------------------------- token_offsets


def test_offsets_are_the_token_lengths_where_tokens_are_text(byte_level: Any) -> None:
    ids = encode(byte_level, "</mem><think>Ulm</think>")
    text, offsets = token_offsets(byte_level, ids)
    assert text == "</mem><think>Ulm</think>"
    assert [text[start:end] for start, end in offsets] == [byte_level.decode([i]) for i in ids]


@pytest.mark.parametrize(
    "text",
    [TURN, "里德学院。", "乌尔姆🙂👩‍👩‍👧 é ß", "a\ufffdb", "\ufffd\ufffd", "", "🙂🙂🙂", "中", "x。</mem>"],
)
@pytest.mark.parametrize("name", ["byte_level", "edge_merges"])
def test_tokens_that_share_a_character_share_its_offset(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = encode(tokenizer, text)
    found, offsets = token_offsets(tokenizer, ids)
    assert found == text
    assert offsets == brute_force(tokenizer, ids)
    assert offsets == sorted(offsets)


def test_one_chinese_character_of_three_bytes(edge_merges: Any) -> None:
    # 德 is three byte tokens: all of them have a part in character 1.
    assert token_offsets(edge_merges, encode(edge_merges, "a德b")) == ("a德b", [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)])


def test_a_segment_is_found_though_its_edges_merge(edge_merges: Any) -> None:
    ids = encode(edge_merges, TURN)
    pieces = [edge_merges.decode([i]) for i in ids]
    assert "。</" in pieces and "><" in pieces and "></" not in TURN
    text, offsets = token_offsets(edge_merges, ids)
    parsed = parse_turn(text, 2)
    assert parsed.valid and parsed.memory == "已解答。" and parsed.memory_chars is not None
    start, end = token_span(offsets, parsed.memory_chars)
    # 5 of <mem>, 3 bytes for each of 已解答, the token 。</, 3 of mem, the token ><
    assert (start, end) == (0, 5 + 9 + 1 + 3 + 1)
    assert edge_merges.decode(ids[start:end]) == "<mem>已解答。</mem><"


def test_an_empty_segment_whose_tags_share_one_token(edge_merges: Any) -> None:
    ids = encode(edge_merges, "<think>a</think><mem></mem>")
    text, offsets = token_offsets(edge_merges, ids)
    chars = (text.index("<mem>"), len(text))
    start, end = token_span(offsets, chars)
    assert edge_merges.decode(ids[start:end]) == "><mem></mem>"  # the token >< overhangs in front
    assert edge_merges.decode(ids[start + 4 : start + 5]) == "></"  # one token holds both inner edges


def test_bytes_that_are_no_character_keep_what_follows_in_place(edge_merges: Any) -> None:
    broken = encode(edge_merges, "里")[:2]  # two of three bytes, as a cut-off generation leaves them
    ids = [*broken, *encode(edge_merges, "<mem>x</mem>"), *broken]
    text, offsets = token_offsets(edge_merges, ids)
    assert text == "\ufffd<mem>x</mem>\ufffd"
    assert token_span(offsets, (1, 13)) == (2, 13)  # < m e m > x </ m e m >


def test_a_decoder_that_strips_the_leading_blank_and_falls_back_to_bytes(byte_fallback: Any) -> None:
    vocab = byte_fallback.get_vocab()
    names = [
        "▁Ulm",
        "▁is",
        "<0xE4>",
        "<0xB8>",
        "<0xAD>",
        "▁<",
        "mem",
        ">",
        "<0xF0>",
        "<0x9F>",
        "<0x99>",
        "<0x82>",
        "</",
    ]
    text, offsets = token_offsets(byte_fallback, [vocab[name] for name in names])
    assert text == "Ulm is中 <mem>🙂</"
    one = [(6, 7)] * 3
    assert offsets == [(0, 3), (3, 6), *one, (7, 9), (9, 12), (12, 13), *[(13, 14)] * 4, (14, 16)]


class CountingTokenizer:
    """Passes ``decode`` on and counts the tokens it is asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.tokens += len(ids)
        return str(self.tokenizer.decode(ids, **options))


def test_the_work_grows_with_the_length_and_not_with_its_square(edge_merges: Any) -> None:
    def work(text: str) -> float:
        counting = CountingTokenizer(edge_merges)
        ids = encode(edge_merges, text)
        token_offsets(counting, ids)
        return counting.tokens / len(ids)

    assert work("里德学院，" * 400) < 15  # tokens decoded for each token; whole prefixes would make it 3000
