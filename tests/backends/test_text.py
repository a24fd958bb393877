"""Deltas join to what the tokenizer decodes, for any tokens at all."""

import threading
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import make_tokenizer, tiny

from mlx_nb.backends.text import LeadingThought, TokenizerCodec, WindowDetokenizer

CODEC = TokenizerCodec(tiny()[1], 400)
TOKENIZER = make_tokenizer()
# Bytes that begin, continue and break characters, far more often than chance would give them.
PIECES = [0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xFF, ord("a"), ord(" ")]


def byte_token(byte: int) -> int:
    """The token of one byte: byte-level BPE writes what can't be printed as characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    found = TOKENIZER.token_to_id(chr(byte) if byte in printable else chr(256 + others.index(byte)))
    assert found is not None
    return int(found)


def byte_tokens(data: bytes) -> list[int]:
    return [byte_token(byte) for byte in data]


any_tokens = st.lists(
    st.sampled_from(byte_tokens(bytes(PIECES))) | st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60
)


def deltas(ids: list[int]) -> list[str]:
    detokenizer = CODEC.detokenizer()
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@settings(max_examples=400, deadline=None)
@given(any_tokens)
@example(byte_tokens(b"\xff" * 7 + "é".encode()))
@example(byte_tokens(b"\x98" * 20 + "😀".encode() * 3))
def test_deltas_join_to_what_the_tokenizer_decodes(ids: list[int]) -> None:
    assert "".join(deltas(ids)) == CODEC.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_tokens_and_back(text: str) -> None:
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        return
    ids = CODEC.encode(text)
    assert "".join(deltas(ids)) == CODEC.decode(ids) == text


def test_a_character_is_given_whole_and_as_soon_as_it_is_complete() -> None:
    ids = byte_tokens("a😀b".encode())
    assert deltas(ids) == ["a", "", "", "", "😀", "b", ""]


def test_what_is_left_of_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    ids = byte_tokens("a😀".encode()[:-1])
    assert deltas(ids) == ["a", "", "", "", "\ufffd"]


def test_nothing_decodes_to_nothing() -> None:
    assert deltas([]) == [""]


def test_the_window_stays_short_however_long_the_answer() -> None:
    longest = 0

    def decode(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return CODEC.decode(ids)

    for tokens in (CODEC.encode("one more word ") * 200, byte_tokens(b"\xff" * 500)):
        detokenizer = WindowDetokenizer(decode)
        text = "".join(map(detokenizer.add, tokens)) + detokenizer.finish()
        assert text == CODEC.decode(tokens)
    assert longest < 40


def test_several_threads_may_encode_and_decode_at_once() -> None:
    text = "A tiny tokenizer learns é 😀 " * 30
    expected = CODEC.encode(text)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(30):
            try:
                ids = CODEC.encode(text)
                if ids != expected or CODEC.decode(ids) != text:
                    wrong.append(ids)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("text", ["", "plain", "<|im_start|>user\nHi<|im_end|>"])
def test_special_tokens_are_read_and_shown(text: str) -> None:
    assert CODEC.decode(CODEC.encode(text)) == text


# -- structured output's one thinking block --------------------------------------------------------------


@st.composite
def in_pieces(draw: st.DrawFn) -> list[str]:
    parts = st.sampled_from(["<think>", "</think>", "<tool_call>", "<thi", "nk>", "</", "a", "{}"])
    whole = "".join(draw(st.lists(parts, max_size=8)))
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(in_pieces(), st.booleans())
def test_a_leading_thought_ends_once_and_all_after_it_is_the_answer(pieces: list[str], opened: bool) -> None:
    whole = "".join(pieces)
    splitter = LeadingThought("<think>", "</think>", thinking=opened)
    found = [piece for text in pieces for piece in splitter.push(text)] + splitter.finish()
    kinds = {kind: "".join(text for k, text in found if k == kind) for kind in ("reasoning", "answer")}
    if opened or whole.startswith("<think>"):
        reasoning, _, answer = (whole if opened else whole.removeprefix("<think>")).partition("</think>")
    else:
        reasoning, answer = "", whole
    assert kinds == {"reasoning": reasoning, "answer": answer}
