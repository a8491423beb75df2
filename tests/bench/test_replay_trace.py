"""Recorded traces: read as recorded, made to fit a context without moving their cache hits, turned into token ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.replay.fit import drop_blocks, fit_trace, resize_blocks
from bench.replay.oracle import Oracle
from bench.replay.plan import WorkloadError, check_order
from bench.replay.prompts import PromptBuilder, trace_level
from bench.replay.trace import Trace, TraceRequest, load_trace
from tests.test_cached_tokens import recorded_requests

DATA = Path(__file__).resolve().parents[1] / "data"
SESSIONS = sorted((DATA / "coding_agent").glob("*.json"))
MOONCAKE = DATA / "mooncake" / "conversation_head.jsonl"
CORPUS = [(7919 * i + i // 13) % 467 + 4 for i in range(4096)]


def hit_rate(requests: list[tuple[list[Any], int]], block_tokens: int) -> float:
    """Ideal hit rate of (block ids, prompt tokens), by comparing each prompt with every earlier one."""
    cached = total = 0
    for position, (blocks, tokens) in enumerate(requests):
        best = 0
        for earlier, _ in requests[:position]:
            shared = 0
            while shared < min(len(blocks), len(earlier)) and blocks[shared] == earlier[shared]:
                shared += 1
            best = max(best, shared)
        cached += min(best, (tokens - 1) // block_tokens) * block_tokens
        total += tokens
    return cached / total


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_every_recorded_session_is_read_whole_with_its_hit_rate(path: Path):
    trace, recorded = load_trace([path]), recorded_requests(path)
    assert len(trace.requests) == len(recorded)
    assert [trace.prompt_tokens(request) for request in trace.requests] == [entry["in"] for entry in recorded]
    assert [request.output_tokens for request in trace.requests] == [entry["out"] for entry in recorded]
    expected = hit_rate([(entry["hash_ids"][: entry["in"] // 64], entry["in"]) for entry in recorded], 64)
    assert trace.ideal_hit_rate == pytest.approx(expected)
    assert 0.85 < expected < 0.99


def test_sessions_of_a_directory_share_nothing():
    trace = load_trace([DATA / "coding_agent"])
    assert trace.num_sessions == 14
    first_blocks = {request.blocks[0] for request in trace.requests}
    assert len({session for session, _ in first_blocks}) == 14
    assert [request.arrival_s for request in trace.requests] == sorted(r.arrival_s for r in trace.requests)


def test_a_mooncake_file_is_read_with_its_conversations():
    rows = [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    trace = load_trace([MOONCAKE])
    assert (trace.block_tokens, len(trace.requests)) == (512, len(rows))
    assert [trace.prompt_tokens(request) for request in trace.requests] == [row["input_length"] for row in rows]
    assert [request.arrival_s for request in trace.requests] == [row["timestamp"] / 1000 for row in rows]
    for request in trace.requests:  # all begin with block 0; those of a session also share the next one
        for earlier in request.after:
            assert trace.requests[earlier].session == request.session
            assert trace.requests[earlier].blocks[:2] == request.blocks[:2]
    assert any(request.turn for request in trace.requests)


NESTED = {
    "block_size": 64,
    "requests": [
        {"t": 0.0, "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 0.0},
        {
            "t": 10.0,
            "type": "subagent",
            "requests": [
                {"t": 1.0, "in": 64, "out": 3, "hash_ids": [9], "think_time": 0.5},
                {"t": 4.0, "in": 128, "out": 3, "hash_ids": [9, 10], "think_time": 0.5},
            ],
        },
        {"t": 12.0, "in": 200, "out": 5, "hash_ids": [1, 2, 3], "think_time": 2.0},
        {"t": 30.0, "in": 256, "out": 5, "hash_ids": [1, 2, 3, 4], "think_time": 3.0},
    ],
}


def test_nested_requests_run_beside_their_parent_and_are_waited_for(tmp_path: Path):
    path = tmp_path / "nested.json"
    path.write_text(json.dumps(NESTED))
    requests = load_trace([path]).requests
    # by time: main 0, sub-agent 11, main 12, sub-agent 14, main 30
    assert [request.arrival_s for request in requests] == [0.0, 11.0, 12.0, 14.0, 30.0]
    assert [len(request.blocks) for request in requests] == [2, 1, 3, 2, 4]
    assert [request.after for request in requests] == [(), (0,), (0,), (1,), (2, 3)]
    assert [request.turn for request in requests] == [0, 1, 2, 3, 4]
    assert [request.tail_tokens for request in requests] == [2, 0, 8, 0, 0]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{}", "'requests' is missing|'block_size' is missing"),
        ("a.json", "nonsense", "cannot read"),
        ("a.jsonl", "", "holds no request"),
        ("a.jsonl", '{"timestamp": 0}', "'hash_ids' is missing"),
    ],
)
def test_a_broken_trace_is_refused_with_its_name(tmp_path: Path, name: str, text: str, words: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(WorkloadError, match=words):
        load_trace([tmp_path / name])
    with pytest.raises(WorkloadError, match="no .json session file"):
        load_trace([DATA])


def shared_blocks(trace: Trace) -> list[list[int]]:
    """Common leading blocks of every pair."""
    paths = [request.blocks for request in trace.requests]
    return [[common(left, right) for right in paths] for left in paths]


def common(left: tuple[Any, ...], right: tuple[Any, ...]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@pytest.mark.parametrize("fit", ["shared", "thin"])
@pytest.mark.parametrize("context", [4096, 16384])
@pytest.mark.parametrize("name", ["trace_0057", "trace_0167"])
def test_a_fitted_session_shares_what_is_left_of_what_it_shared(name: str, context: int, fit):
    trace = load_trace([DATA / "coding_agent" / f"{name}.json"])
    fitted, report = fit_trace(trace, context, 128, fit)
    longest = max(fitted.prompt_tokens(request) + request.output_tokens for request in fitted.requests)
    assert longest <= context
    before, after = shared_blocks(trace), shared_blocks(fitted)
    kept = [set(new.blocks) for new in fitted.requests]
    for i, request in enumerate(trace.requests):
        assert list(fitted.requests[i].blocks) == [block for block in request.blocks if block in kept[i]]
        assert fitted.requests[i].tail_tokens == request.tail_tokens
        for j in range(i):
            assert after[i][j] == sum(block in kept[i] for block in request.blocks[: before[i][j]])
    assert report.hit_rate > 0.7
    if max(map(trace.prompt_tokens, trace.requests)) + 128 <= context:
        assert fitted.requests == fit_trace(trace, None, 128, fit)[0].requests


def test_thinning_keeps_the_hit_rate_and_shared_keeps_new_input():
    trace = load_trace([DATA / "coding_agent" / "trace_0167.json"])
    new_input = [len(request.blocks) for request in trace.requests]
    thin, thin_report = fit_trace(trace, 8192, 128, "thin")
    assert thin_report.hit_rate == pytest.approx(thin_report.recorded_hit_rate, abs=0.03)
    limit = 64 * max(new_input) - 64 * 40  # forty blocks too many, fewer than all requests share
    shared, _ = fit_trace(trace, limit, 1, "shared")
    drop = {old - len(new.blocks) for old, new in zip(new_input, shared.requests)}
    assert len(drop) == 1  # every request lost the same blocks, so each turn's new input is whole


def test_a_resized_block_keeps_the_structure():
    trace = load_trace([DATA / "coding_agent" / "trace_0057.json"])
    small = resize_blocks(trace, 4)
    assert small.block_tokens == 4
    assert [request.blocks for request in small.requests] == [request.blocks for request in trace.requests]
    assert small.ideal_hit_rate == pytest.approx(trace.ideal_hit_rate, abs=0.01)
    for old, new in zip(trace.requests, small.requests):
        assert new.tail_tokens == (max(1, old.tail_tokens // 16) if old.tail_tokens else 0)


def test_a_context_too_small_for_any_block_is_refused():
    trace = load_trace([DATA / "coding_agent" / "trace_0057.json"])
    with pytest.raises(WorkloadError, match="a context of 150 tokens is too small"):
        fit_trace(trace, 150, 128, "shared")


def test_mooncake_conversations_fit_and_still_begin_alike():
    trace = load_trace([MOONCAKE])
    fitted = drop_blocks(trace, 8192, "thin")
    assert all(request.blocks[:1] == trace.requests[0].blocks[:1] for request in fitted.requests if request.blocks)
    fitted, report = fit_trace(trace, 8192, 128, "thin")
    assert max(fitted.prompt_tokens(request) + request.output_tokens for request in fitted.requests) <= 8192
    assert report.prompt_tokens < report.recorded_prompt_tokens


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.sampled_from([2, 4]),
)
def test_prompts_share_exactly_the_blocks_that_the_trace_shares(paths: list[list[int]], tails: list[int], size: int):
    requests = [
        TraceRequest(0, turn, float(turn), 0.0, tuple(path), ("tail", turn), min(tails[turn], size - 1), 1)
        for turn, path in enumerate(paths)
    ]
    builder = PromptBuilder(CORPUS, size, seed=3)
    prompts = [builder.prompt(request) for request in requests]
    for i, left in enumerate(prompts):
        assert len(left) == size * len(paths[i]) + requests[i].tail_tokens
        for j, right in enumerate(prompts[:i]):
            tokens = common(tuple(left), tuple(right))
            assert tokens == size * common(tuple(paths[i]), tuple(paths[j]))


def test_the_oracle_counts_the_ideal_hits_of_a_session():
    trace, _ = fit_trace(load_trace([DATA / "coding_agent" / "trace_0167.json"]), None, 1, "shared", block_tokens=4)
    builder, oracle = PromptBuilder(CORPUS, 4, seed=0), Oracle(4)
    cached = total = 0
    for index, request in enumerate(trace.requests):
        prompt = builder.prompt(request)
        cached, total = cached + oracle.count(prompt), total + len(prompt)
        oracle.add(prompt, (0, index))
    assert cached / total == pytest.approx(trace.ideal_hit_rate)


def test_open_loop_scales_recorded_arrivals_and_starts_sessions_apart():
    trace = load_trace(SESSIONS[:3])
    level = trace_level(trace, [[1]] * len(trace.requests), speed=4.0, session_gap_s=8.0)
    due = sorted(request.arrival_s + 8.0 * request.session for request in trace.requests)
    assert [request.arrival_s for request in level.requests] == [time / 4 for time in due]
    assert all(request.after == () and request.think_s == 0.0 for request in level.requests)
    assert level.offered_qps == pytest.approx((len(due) - 1) / (due[-1] - due[0]) * 4)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_closed_loop_runs_so_many_sessions_at_once_each_in_its_order(concurrency: int):
    trace = load_trace(SESSIONS[:5])
    level = trace_level(trace, [[1]] * len(trace.requests), concurrency=concurrency, think_scale=0.5)
    check_order(level.requests)
    ended: dict[int, float] = {}
    spans: dict[int, list[float]] = {}
    for request in level.requests:  # every request takes a second
        begin = max([ended[earlier] for earlier in request.after], default=0.0)
        ended[request.index] = begin + 1.0
        spans.setdefault(request.session, []).extend([begin, begin + 1.0])
    for time in sorted(ended.values()):
        assert sum(min(span) < time <= max(span) for span in spans.values()) <= concurrency
    turns: dict[int, list[int]] = {}
    for request in level.requests:
        turns.setdefault(request.session, []).append(request.turn)
    assert all(order == sorted(order) for order in turns.values())
    thinking = [request.think_s for request in level.requests if request.turn]
    recorded = [request.think_s for request in trace.requests if request.turn]
    assert sorted(thinking) == sorted(0.5 * pause for pause in recorded)
