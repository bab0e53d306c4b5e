"""B01 to B04: text as it streams, whole characters, and stop strings that are defined on text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.text.detokenizer import Detokenizer
from obole.text.gguf_tokenizer import tokenizer_from_gguf
from obole.text.stops import stop_automaton
from obole.text.tokenizer import Tokenizer
from obole.types import TextTracker
from obole.weights.gguf import read_gguf
from tests.text.vocabularies import byte_level, gguf_metadata, sentencepiece_metadata

BYTES = tokenizer_from_gguf(gguf_metadata(byte_level("gpt-2"), "gpt-2"))
PIECES = tokenizer_from_gguf(sentencepiece_metadata())
UNPREFIXED = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
HARD = "ď 🫠 🥹 龜 👩‍👩‍👧 नमस्ते"


def byte_ids(content: bytes) -> list[int]:
    """One token for each byte."""
    return [4 + byte for byte in content]  # the byte tokens of the SentencePiece vocabulary


def stream(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = (), prompt: tuple[int, ...] = ()) -> list[str]:
    """The deltas, one for each token and one for the end."""
    tracker: TextTracker = Detokenizer(tokenizer, stops, prompt)
    deltas = []
    for token in ids:
        stopped = tracker.push(token, stops=True)
        deltas.append(tracker.take())
        if stopped:
            break
    tracker.flush()
    return [*deltas, tracker.take()]


def reference(text: str, stops: tuple[str, ...]) -> str:
    """Where the text is cut, straight from the definition."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, UNPREFIXED], ids=["bytes", "prefixed", "unprefixed"])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_deltas_join_to_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids, stops=("\x00\x00never",))) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 255).map(lambda byte: 4 + byte), max_size=60))
@settings(max_examples=200, deadline=None)
def test_bytes_decode_as_python_decodes_them(ids: list[int]) -> None:
    whole = bytes(i - 4 for i in ids).decode("utf-8", "replace")
    assert "".join(stream(UNPREFIXED, ids)) == whole


@given(
    text=st.text(alphabet="ab龜", max_size=40),
    stops=st.lists(st.text(alphabet="ab龜", min_size=1, max_size=5), min_size=1, max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_tokens(text: str, stops: list[str]) -> None:
    expected = reference(text, tuple(stops))
    by_bytes = stream(UNPREFIXED, byte_ids(text.encode()), tuple(stops))
    by_tokens = stream(BYTES, BYTES.encode(text, special=False), tuple(stops))
    assert "".join(by_bytes) == "".join(by_tokens) == expected


def test_no_half_characters_and_none_held() -> None:
    tracker = Detokenizer(UNPREFIXED)
    for character in HARD:
        pieces = byte_ids(character.encode())
        for token in pieces[:-1]:
            tracker.push(token)
            assert tracker.take() == ""
        tracker.push(pieces[-1])
        assert tracker.take() == character


@pytest.mark.parametrize("tokenizer", [BYTES, UNPREFIXED], ids=["bytes", "pieces"])
def test_cut_in_the_middle_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🫠", special=False)
    for size in range(len(ids) + 1):
        deltas = stream(tokenizer, ids[:size])
        assert "".join(deltas) == tokenizer.decode(ids[:size])
        assert "\ufffd" not in "".join(deltas[:-1])  # only the end shows that something is missing
    assert "".join(stream(UNPREFIXED, byte_ids("a🫠".encode()[:-1]))) == "a\ufffd"


def test_invalid_byte_is_one_replacement_character_and_text_goes_on() -> None:
    assert stream(UNPREFIXED, byte_ids(b"a\xffbc")) == ["a", "\ufffd", "b", "c", ""]
    assert stream(UNPREFIXED, byte_ids(b"\xe2\x82A")) == ["", "", "\ufffdA", ""]


def test_prompt_that_ends_in_the_middle_of_a_character() -> None:
    head = tuple(byte_ids("secret 龜".encode()[:-1]))
    assert "".join(stream(UNPREFIXED, byte_ids("龜".encode()[-1:] + b" ok"), prompt=head)) == "\ufffd ok"


def test_first_space_of_sentencepiece() -> None:
    ids = PIECES.encode("the end", special=False)
    assert "".join(stream(PIECES, ids)) == PIECES.decode(ids) == "the end"
    assert "".join(stream(PIECES, ids, prompt=(1, 3))) == "the end"  # after a control token the space is the tokenizer's
    assert "".join(stream(PIECES, ids, prompt=(1, *ids))) == " the end"  # after text it is the model's
    assert "".join(stream(UNPREFIXED, UNPREFIXED.encode(" the", special=False))) == " the"


def test_control_tokens_are_not_shown() -> None:
    assert stream(BYTES, [1, *BYTES.encode("a", special=False), 2]) == ["", "a", "", ""]


LETTERS = byte_ids(b"ABCDEFGHIJK")


def test_match_over_several_tokens() -> None:
    assert stream(UNPREFIXED, LETTERS, ("DEFGHIJ",)) == ["A", "B", "C", "", "", "", "", "", "", "", ""]


def test_no_match_loses_nothing() -> None:
    deltas = stream(UNPREFIXED, LETTERS, ("DEFGHIX",))
    assert "".join(deltas) == "ABCDEFGHIJK"
    assert deltas[9] == "DEFGHIJ"  # as soon as it cannot match any more


def test_a_live_prefix_at_the_end_is_released() -> None:
    assert stream(UNPREFIXED, LETTERS[:6], ("DEFGHIX",)) == ["A", "B", "C", "", "", "", "DEF"]


def test_unrelated_stop_strings_delay_nothing() -> None:
    assert stream(UNPREFIXED, LETTERS, ("z" * 200,))[:3] == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("Pari", " "), ("ris, F", " Pa"), ("s", " Pari"), (" Paris, France", ""), ("aris, Fra", " P"), ("x", " Paris, France")],
)
def test_match_inside_and_across_tokens(stop: str, expected: str) -> None:
    made = byte_level("gpt-2")
    for tokenizer in (BYTES, tokenizer_from_gguf(gguf_metadata(made, "qwen2"))):
        assert "".join(stream(tokenizer, tokenizer.encode(" Paris, France", special=False), (stop,))) == expected


def test_of_several_the_first_complete_then_the_longest() -> None:
    assert "".join(stream(UNPREFIXED, byte_ids(b"abcd"), ("abcd", "bc"))) == "a"
    assert "".join(stream(UNPREFIXED, byte_ids(b"xabc"), ("bc", "abc", "c"))) == "x"


def test_before_min_tokens_nothing_stops() -> None:
    tracker = Detokenizer(UNPREFIXED, ("AB", "BC"))
    assert not tracker.push(LETTERS[0], stops=False)
    assert not tracker.push(LETTERS[1], stops=False)
    assert tracker.take() == "A"  # "B" may begin "BC"
    assert tracker.push(LETTERS[2], stops=True)
    tracker.flush()
    assert tracker.take() == ""


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4),
    minimum=st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_what_is_held_back_is_a_live_prefix(text: str, stops: list[str], minimum: int) -> None:
    tracker = Detokenizer(UNPREFIXED, stops)
    given_away = ""
    for place, token in enumerate(byte_ids(text.encode())):
        seen = text[: place + 1]
        if tracker.push(token, stops=place >= minimum):
            assert seen == given_away + tracker.take() + max((s for s in stops if seen.endswith(s)), key=len)
            return
        given_away += tracker.take()
        assert place < minimum or not any(map(seen.endswith, stops))
        live = [s[:size] for s in stops for size in range(len(s)) if seen.endswith(s[:size])]
        assert seen == given_away + max(live, key=len, default="")
    tracker.flush()
    assert given_away + tracker.take() == text


def test_after_the_end_nothing_comes() -> None:
    tracker = Detokenizer(UNPREFIXED, ("B",))
    assert not tracker.push(LETTERS[0])
    assert tracker.push(LETTERS[1])
    assert tracker.push(LETTERS[2])
    tracker.flush()
    assert tracker.take() == "A"
    ended = Detokenizer(UNPREFIXED, ("B",))
    ended.flush()
    assert not ended.push(LETTERS[1])
    assert ended.take() == ""


def test_many_long_stop_strings_are_shared_and_linear() -> None:
    stops = tuple("a" * (137 + i) for i in range(64))
    assert stop_automaton(stops) is stop_automaton((*stops,))
    automaton = stop_automaton(stops)
    state, steps = 0, 0
    for _ in range(136):
        state = automaton.step(state, "a")
    for character in "b" * 5000:  # a failure costs its length once, not for each token
        state = automaton.step(state, character)
        steps += 1
    assert (state, steps) == (0, 5000)


@pytest.fixture(scope="module")
def smollm(default_model_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(read_gguf(default_model_path).metadata)


def test_default_model_streams_what_it_decodes(smollm: Tokenizer) -> None:
    @given(ids=st.lists(st.integers(0, smollm.vocab_size - 1), max_size=60))
    @settings(max_examples=200, deadline=None)
    def check(ids: list[int]) -> None:
        assert "".join(stream(smollm, ids)) == smollm.decode(ids)

    check()
    ids = smollm.encode(HARD, special=False)
    assert "".join(stream(smollm, ids)) == HARD
    assert "\ufffd" not in "".join(stream(smollm, ids))
