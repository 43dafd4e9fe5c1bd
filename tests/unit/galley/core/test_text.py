"""Incremental text: no broken UTF-8, nothing lost, stop strings wherever they fall."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from galley.core.answer.text import TextStream


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def pieces(tokens: Sequence[int], stops: Sequence[str] = ()) -> tuple[list[str], str | None]:
    stream = TextStream(decode, (), stops)
    texts = []
    for token in tokens:
        piece = stream.push(token)
        texts.append(piece.text)
        if piece.stop is not None:
            return texts, piece.stop
    texts[-1:] = [texts[-1] + stream.flush()] if texts else []
    return texts, None


@given(st.text(max_size=60))
def test_pieces_of_valid_text_concatenate(text: str) -> None:
    texts, _ = pieces(text.encode())
    assert "".join(texts) == text
    for piece in texts:
        assert "\ufffd" not in piece or "\ufffd" in text


@given(st.binary(max_size=60))
def test_any_bytes_concatenate(data: bytes) -> None:
    texts, _ = pieces(data)
    clean = decode(data).replace("\ufffd", "")
    assert "".join(texts).replace("\ufffd", "") == clean


@given(st.integers(0, 40), st.sampled_from("é€🚀"))
def test_a_character_after_invalid_bytes_stays_whole(invalid: int, character: str) -> None:
    texts, _ = pieces(b"\xff" * invalid + character.encode())
    assert "".join(texts) == "\ufffd" * invalid + character


HIDDEN = 256


def decode_visible(tokens: Sequence[int]) -> str:
    return decode([token for token in tokens if token != HIDDEN])


@given(st.text("aé€🚀", max_size=12), st.data())
def test_control_tokens_do_not_change_the_text(text: str, data: st.DataObject) -> None:
    tokens: list[int] = []
    for byte in text.encode():
        tokens += [HIDDEN] * data.draw(st.sampled_from((0, 0, 1, 13, 20)))
        tokens.append(byte)
    stream = TextStream(decode_visible, ())
    assert "".join(stream.push(token).text for token in tokens) + stream.flush() == decode_visible(tokens)


def test_a_character_after_many_control_tokens_stays_whole() -> None:
    stream = TextStream(decode_visible, (ord("x"),))
    texts = [stream.push(token).text for token in [HIDDEN] * 13 + list("🚀".encode())]
    assert texts == [""] * 16 + ["🚀"]


@given(st.lists(st.sampled_from([HIDDEN, *b"ab\xff", *"é🚀".encode()]), max_size=40), st.booleans())
def test_the_rest_of_the_text_is_held_back(tokens: list[int], stops: bool) -> None:
    stream = TextStream(decode_visible, (), ["a\0", "baaa\0", "aé🚀\0"] if stops else ())
    text = ""
    for end, token in enumerate(tokens, 1):
        text += stream.push(token).text
        assert len(text) + stream.held_length == len(decode_visible(tokens[:end]))
    text += stream.flush()
    assert (len(text), stream.held_length) == (len(decode_visible(tokens)), 0)


@given(st.text("ab<>", max_size=40), st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3))
def test_stops_cut_where_the_first_one_starts(text: str, stops: list[str]) -> None:
    texts, stop = pieces(text.encode(), stops)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert stop is None
        assert "".join(texts) == text
    else:
        first_end = min(end for end, _ in ends)
        assert stop in stops
        assert len(texts) == first_end, "detected with the token that completes it"
        assert "".join(texts) == text[: min(at for end, at in ends if end == first_end)]


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2), st.data())
def test_the_text_of_a_token_depends_on_the_tokens_before_it_alone(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    tokens = text.encode()
    cut = data.draw(st.integers(0, len(tokens)))
    whole, again = TextStream(decode, (), stops), TextStream(decode, (), stops)
    first = [whole.push(token).text for token in tokens]
    assert [again.push(token).text for token in tokens[:cut]] == first[:cut]


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    stream = TextStream(decode, (), ["b"])
    assert stream.push(ord("b"), may_stop=False).text == "b"
    assert stream.push(ord("b")).stop == "b"


def test_text_after_a_prompt_keeps_its_leading_space() -> None:
    """Sentencepiece decoders drop the first space; decoding the prompt along keeps it."""
    words = {0: "▁Hello", 1: "▁world"}

    def strip_first(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    assert TextStream(strip_first, (0,)).push(1).text == " world"
    assert TextStream(strip_first, ()).push(1).text == "world"


@given(st.text("aé€🚀", min_size=1, max_size=8), st.data())
def test_a_character_that_the_prompt_begins_is_whole_in_the_answer(text: str, data: st.DataObject) -> None:
    tokens = text.encode()
    cut = data.draw(st.integers(0, len(tokens)))
    stream = TextStream(decode, tokens[:cut])
    answer = "".join(stream.push(token).text for token in tokens[cut:]) + stream.flush()
    whole_characters = tokens[:cut].decode(errors="ignore")
    assert answer == (text.removeprefix(whole_characters) if cut < len(tokens) else "")


@given(st.integers(0, 6), st.sampled_from((b"", b"\xe2", b"\xe2\x82", b"\xf0\x9f\x9a")))
def test_invalid_bytes_of_the_prompt_are_not_in_the_answer(invalid: int, begun: bytes) -> None:
    stream = TextStream(decode, b"\xff" * invalid + begun)
    assert "".join(stream.push(token).text for token in b"ab") + stream.flush() == "ab"
