import pytest

from bench.stats import nearest_rank, summarize


def test_nearest_rank_p99_of_120_values_is_the_119th():
    values = [float(value) for value in range(120, 0, -1)]
    assert nearest_rank(values, 99) == 119.0


@pytest.mark.parametrize(("percent", "expected"), [(5, 15), (30, 20), (40, 20), (50, 35), (100, 50)])
def test_nearest_rank_agrees_with_the_textbook_example(percent: float, expected: float):
    assert nearest_rank([35, 20, 15, 50, 40], percent) == expected


def test_nearest_rank_is_not_moved_by_rounding_of_the_rank():
    # ceil(0.07 * 100) is 8 in binary floating point; the rank is 7
    assert nearest_rank(list(range(1, 101)), 7) == 7
    assert nearest_rank(list(range(1, 101)), 99) == 99


@pytest.mark.parametrize("percent", [0, -1, 100.5])
def test_percentages_outside_the_range_are_refused(percent: float):
    with pytest.raises(ValueError, match="percent"):
        nearest_rank([1.0], percent)


def test_a_summary_of_nothing_holds_no_numbers():
    summary = summarize([])
    assert (summary.n, summary.p50, summary.p99, summary.mean) == (0, None, None, None)


def test_a_summary_agrees_with_hand_computed_values():
    summary = summarize([4.0, 1.0, 3.0, 2.0])
    assert (summary.n, summary.min, summary.p50, summary.p90, summary.max, summary.mean) == (4, 1.0, 2.0, 4.0, 4.0, 2.5)
