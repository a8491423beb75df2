import ast
import asyncio
import hashlib
from itertools import islice

import pytest

from bench.replay.codegen import session_text, turn_text
from bench.replay.workload import NUM_SESSIONS, Workload, WorkloadError, arrival_s, make_prefixes, plan_level

SMALL = Workload(prefix_tokens=512, new_tokens=64, output_tokens=16, requests=40)


async def bytes_as_tokens(text: str) -> list[int]:
    return list(text.encode())


def plan(workload: Workload, qps: float):
    async def make():
        prefixes = await make_prefixes(workload, bytes_as_tokens)
        return prefixes, await plan_level(workload, qps, prefixes, bytes_as_tokens)

    return asyncio.run(make())


def test_arrivals_follow_the_exercise():
    # warm-up i * 2000 ms, then 16000 + (i - 8) * 1000 / qps ms
    standard = Workload()
    assert [arrival_s(standard, 4, index) for index in (0, 1, 7)] == [0.0, 2.0, 14.0]
    assert arrival_s(standard, 4, 8) == 16.0
    assert arrival_s(standard, 4, 9) == 16.25
    assert arrival_s(standard, 1, 127) == 135.0


def test_standard_sizes_are_those_of_the_exercise():
    standard = Workload()
    assert (standard.prefix_tokens, standard.new_tokens, standard.output_tokens, standard.requests) == (
        3968,
        128,
        128,
        128,
    )
    assert standard.prompt_tokens == 4096


def test_every_prompt_has_exactly_the_asked_tokens_and_its_sessions_prefix():
    prefixes, planned = plan(SMALL, 2)
    assert [request.index for request in planned] == list(range(40))
    for request in planned:
        assert request.session == request.index % 8
        assert request.phase == ("warmup" if request.index < 8 else "measured")
        assert len(request.prompt_token_ids) == 576
        assert request.prompt_token_ids[:512] == prefixes[request.session]


def test_sessions_and_new_inputs_differ_within_their_first_sixteen_tokens():
    prefixes, planned = plan(SMALL, 2)
    assert len({tuple(prefix[:16]) for prefix in prefixes}) == NUM_SESSIONS
    assert len({tuple(request.prompt_token_ids[512:528]) for request in planned}) == len(planned)


def test_a_level_is_the_same_in_any_run_and_differs_from_other_levels_and_seeds():
    assert plan(SMALL, 2) == plan(SMALL, 2)
    first, other = plan(SMALL, 2)[1], plan(SMALL, 4)[1]
    assert all(a.prompt_token_ids[:512] == b.prompt_token_ids[:512] for a, b in zip(first, other))
    assert all(a.prompt_token_ids[512:] != b.prompt_token_ids[512:] for a, b in zip(first, other))
    reseeded = plan(Workload(prefix_tokens=512, new_tokens=64, output_tokens=16, requests=40, seed=1), 2)[1]
    assert all(a.prompt_token_ids[:512] != b.prompt_token_ids[:512] for a, b in zip(first, reseeded))


def test_generated_text_is_the_same_on_every_machine():
    text = "".join(islice(session_text(0, 3), 5)) + "".join(islice(turn_text(0, "4", 9, 1), 5))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "ebbe36beef6b3e3bf5a3dfffc199edad78819dc3dae008a5955401bf821d3856"
    )


@pytest.mark.parametrize("session", range(NUM_SESSIONS))
def test_generated_modules_are_valid_python(session: int):
    for module in islice(session_text(7, session), 1, 20):
        ast.parse(module)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"requests": 8}, "requests"),
        ({"prefix_tokens": 0}, "prefix_tokens"),
        ({"new_tokens": 0}, "new_tokens"),
        ({"output_tokens": 1}, "output_tokens"),
        ({"warmup_gap_s": -1}, "warmup_gap_s"),
    ],
)
def test_impossible_sizes_are_refused_by_name(values: dict[str, int], named: str):
    with pytest.raises(WorkloadError, match=named):
        Workload(**values)
