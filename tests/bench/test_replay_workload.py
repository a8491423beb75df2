import ast
import asyncio
import hashlib
import sysconfig
from itertools import islice
from pathlib import Path

import pytest

from bench.replay.codegen import session_text, turn_text
from bench.replay.plan import WorkloadError
from bench.replay.source_code import NUM_SESSIONS, STDLIB, session_source
from bench.replay.workload import Workload, arrival_s, make_prefixes, plan_closed_level, plan_level

SMALL = Workload(prefix_tokens=512, new_tokens=64, output_tokens=16, requests=40)


async def bytes_as_tokens(text: str) -> list[int]:
    return list(text.encode())


def plan(workload: Workload, qps: float):
    async def make():
        prefixes = await make_prefixes(workload, bytes_as_tokens)
        return prefixes, (await plan_level(workload, qps, prefixes, bytes_as_tokens)).requests

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


def test_closed_loop_keeps_so_many_requests_running_after_the_warm_up():
    async def make():
        prefixes = await make_prefixes(SMALL, bytes_as_tokens)
        return await plan_closed_level(SMALL, 3, 0.5, prefixes, bytes_as_tokens)

    level = asyncio.run(make())
    requests = level.requests
    assert (level.concurrency, level.offered_qps) == (3, None)
    assert [request.after for request in requests[:8]] == [()] * 8
    assert [request.after for request in requests[8:11]] == [tuple(range(8))] * 3
    assert [request.after for request in requests[11:14]] == [(8,), (9,), (10,)]
    assert {request.think_s for request in requests[:11]} == {0.0}
    assert {request.think_s for request in requests[11:]} == {0.5}
    assert all(
        request.prompt_token_ids[:512] == requests[request.session].prompt_token_ids[:512] for request in requests
    )


def test_prefixes_are_real_source_code_and_sessions_share_no_file():
    texts = ["".join(islice(session_source(STDLIB, 0, session), 3)) for session in range(NUM_SESSIONS)]
    library = Path(sysconfig.get_paths()["stdlib"])
    for text in texts:
        head, name, code = text.partition("# file 0: ")[0], *text.partition("# file 0: ")[2].split("\n", 1)
        assert code == (library / name).read_text(errors="replace")
        assert head.splitlines()[0].endswith(" workspace")
    assert len({text.partition("# file 0: ")[2].partition("\n")[0] for text in texts}) == NUM_SESSIONS


def test_a_directory_of_ones_own_code_is_used_and_too_little_of_it_refused(tmp_path: Path):
    for number in range(8):
        (tmp_path / f"module_{number}.go").write_text(f"// file {number}\n" * 300)
    assert "// file" in "".join(islice(session_source(str(tmp_path), 0, 5), 3))
    (tmp_path / "module_7.go").unlink()
    with pytest.raises(WorkloadError, match="holds 7 source files"):
        session_source(str(tmp_path), 0, 5)
