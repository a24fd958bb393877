"""Stop strings act on text: however it is cut, and nothing of one is ever let through."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_nb.engine.stops import StopFilter

text = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def first_complete(text: str, stops: list[str]) -> str | None:
    """Text before the stop string that is complete first, read character by character; of two, the longer."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


@st.composite
def cut(draw: st.DrawFn) -> list[str]:
    whole = draw(text)
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


@settings(max_examples=500, deadline=None)
@given(cut(), stops)
def test_the_result_is_the_same_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    expected = first_complete("".join(pieces), stops)
    passed, stopped = "", False
    stop_filter = StopFilter(stops)
    for piece in pieces:
        more, stopped = stop_filter.push(piece)
        passed += more
        if stopped:
            break
        assert expected is None or expected.startswith(passed)
    if not stopped:
        passed += stop_filter.flush()
    assert (passed, stopped) == (("".join(pieces), False) if expected is None else (expected, True))


@settings(max_examples=300, deadline=None)
@given(cut(), stops)
def test_only_what_may_be_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    stop_filter, seen, passed = StopFilter(stops), "", ""
    for piece in pieces:
        seen += piece
        more, stopped = stop_filter.push(piece)
        passed += more
        if stopped:
            break
        held = seen.removeprefix(passed)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_everything_passes() -> None:
    assert StopFilter([]).push("anything") == ("anything", False)
    assert StopFilter([]).flush() == ""


def test_of_two_that_end_together_the_longer_is_cut_off() -> None:
    assert StopFilter(["END", " END"]).push("the END") == ("the", True)


def test_the_one_that_is_complete_first_wins_over_one_that_begins_first() -> None:
    assert StopFilter(["bcdef", "d"]).push("abcdefg") == ("abc", True)
