"""Prompt chunks beside running sequences are as long as the target time between tokens allows."""

import pytest

from decode_worker import pace
from decode_worker.pace import MIN_CHUNK_TOKENS, Pace


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def turn(paced: Pace, clock: list[float], ms: float, chunk: int, running: bool = True) -> None:
    paced.begin()
    clock[0] += ms / 1000
    paced.end(chunk, running)


def test_without_a_target_chunks_are_whole(clock):
    paced = Pace(None)
    turn(paced, clock, 50, 1000)
    assert paced.chunk_tokens() is None


def test_the_chunk_fills_what_a_decode_step_leaves_of_the_target(clock):
    paced = Pace(target_ms=20)
    for _ in range(100):
        turn(paced, clock, 5, 0)
    for _ in range(100):
        turn(paced, clock, 5 + 40, 4000)  # 100 tokens a millisecond
    assert paced.chunk_tokens() == pytest.approx(15 * 100, rel=0.01)


def test_an_impossible_target_still_lets_prompts_through(clock):
    paced = Pace(target_ms=1)
    for _ in range(50):
        turn(paced, clock, 5, 0)
        turn(paced, clock, 9, 400)
    assert paced.chunk_tokens() == MIN_CHUNK_TOKENS


def test_turns_without_running_sequences_say_nothing_about_steps(clock):
    paced = Pace(target_ms=20)
    turn(paced, clock, 500, 4000, running=False)
    assert (paced.step_ms, paced.tokens_per_ms) == (0, 0)
