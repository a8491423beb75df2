"""Stop strings: any split of a text gives what cutting the whole text gives, and nothing is shown too early or lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.stop_strings import StopStrings

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first prefix of the text that ends in a stop string loses the longest one it ends in."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            hit = max(ending, key=len)
            return text[: end - len(hit)], hit
    return text, None


def split(text: str, marks: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(mark % (len(text) + 1) for mark in marks)})
    return [text[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]


def feed(stops: StopStrings, parts: list[str]) -> str:
    shown = ""
    for part in parts:
        shown += stops.push(part)
        if stops.hit is not None:
            return shown
    return shown + stops.flush()


@given(text=TEXTS, stops=STOPS, marks=st.lists(st.integers(0, 100), max_size=12))
@settings(max_examples=500)
def test_any_split_gives_what_cutting_the_whole_gives(text: str, stops: list[str], marks: list[int]) -> None:
    stop_strings = StopStrings(stops)
    assert (feed(stop_strings, split(text, marks)), stop_strings.hit) == cut(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_an_included_stop_string_ends_the_answer(text: str, stops: list[str]) -> None:
    stop_strings = StopStrings(stops, include=True)
    expected, hit = cut(text, stops)
    assert feed(stop_strings, list(text)) == expected + (hit or "")


@given(text=TEXTS, stops=STOPS)
def test_no_more_is_held_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    shown = seen = ""
    for char in text:
        shown += stop_strings.push(char)
        if stop_strings.hit is not None:
            return
        seen += char
        tails = [seen[begin:] for begin in range(len(seen))]
        possible = [tail for tail in tails if any(stop.startswith(tail) for stop in stops)]
        assert seen == shown + max(possible, key=len, default="")


@given(text=TEXTS, stops=STOPS, num_free=st.integers(0, 10))
def test_a_stop_string_that_ends_before_min_tokens_does_not_count(text: str, stops: list[str], num_free: int) -> None:
    stop_strings = StopStrings(stops)
    shown, end = "", None
    for count, char in enumerate(text, start=1):
        shown += stop_strings.push(char, armed=count > num_free)
        if stop_strings.hit is not None:
            end = count
            break
    ends = [n for n in range(num_free + 1, len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    assert end == (ends[0] if ends else None)
    if end is None:
        assert shown + stop_strings.flush() == text
    else:
        assert shown + stop_strings.hit == text[:end]
