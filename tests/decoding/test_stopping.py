"""Ends of texts: exactly there, across rounds, in whole characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bastion.decoding.stopping import StopRules, TextStream
from bastion.errors import BastionError


class ByteTokenizer:
    """One token a byte, so that characters span tokens; 256 is special."""

    def decode(self, tokens, skip_special_tokens):
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def stream_of(max_new_tokens=1000, eos=(256,), strings=()):
    return TextStream(ByteTokenizer(), StopRules(max_new_tokens, frozenset(eos), tuple(strings)))


def split(tokens, sizes):
    """Cut into rounds of the given sizes; the rest in one piece."""
    rounds, start = [], 0
    for size in sizes:
        rounds.append(tokens[start : start + size])
        start += size
    return [*rounds, tokens[start:]]


ROUNDS = st.lists(st.integers(1, 5), max_size=30)


@given(st.text(max_size=40), ROUNDS)
def test_pieces_join_to_the_text_whatever_the_rounds(text, sizes):
    stream = stream_of()
    tokens = [*text.encode(), 256]
    pieces = [stream.push(part) for part in split(tokens, sizes)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)
    assert stream.finish_reason == "eos"
    assert stream.tokens == tokens


@given(
    st.text("ab<>é", max_size=40), st.lists(st.text("ab<>é", min_size=1, max_size=4), min_size=1, max_size=3), ROUNDS
)
def test_text_is_trimmed_before_the_first_stop_string(text, strings, sizes):
    stream = stream_of(strings=strings)
    tokens = [*text.encode(), 256]
    pieces = [stream.push(part) for part in split(tokens, sizes)]
    # The stop that is complete first ends the text; among those complete at once, the one that starts first.
    ends = [text.find(string) + len(string) for string in strings if string in text]
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(string) for string in strings if string in seen)]
        assert stream.finish_reason == "stop"
        assert bytes(stream.tokens).decode() == seen  # never a token too many
    else:
        expected = text
        assert stream.finish_reason == "eos"
    assert "".join(pieces) == expected


@given(st.integers(1, 20), ROUNDS)
def test_never_a_token_too_many(limit, sizes):
    stream = stream_of(limit)
    pieces = [stream.push(part) for part in split(list(b"x" * 40), sizes)]
    assert len(stream.tokens) == limit
    assert "".join(pieces) == "x" * limit
    assert stream.finish_reason == "length"


def test_a_held_back_beginning_of_a_stop_string_is_shown_at_the_end():
    stream = stream_of(strings=["END"])
    assert stream.push(list(b"xEN")) == "x"
    assert stream.push([256]) == "EN"


def test_a_text_cut_inside_a_character_shows_what_decoding_shows():
    stream = stream_of(2)
    assert "".join(stream.push([token]) for token in "aé".encode()) == "a\ufffd"


def test_impossible_rules_are_refused():
    with pytest.raises(BastionError, match="max_new_tokens must be 1 or more"):
        StopRules(0)
    with pytest.raises(BastionError, match="stop string must not be empty"):
        StopRules(strings=("a", ""))
