"""The routing policy on hand-made numbers: what must win, and why."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.routing import Candidate, Policy, WorkerBlocks


def chosen(*candidates: Candidate) -> str:
    return Policy().choose(candidates).name


def test_the_worker_that_has_the_prompt_cached_wins():
    assert chosen(Candidate("a", cached_blocks=3), Candidate("b", cached_blocks=40), Candidate("c")) == "b"


def test_with_nothing_cached_the_emptiest_worker_wins():
    assert chosen(Candidate("a", batch=0.2), Candidate("b", batch=0.1), Candidate("c", batch=0.15)) == "b"


def test_score_follows_the_documented_formula():
    # a: 20 - 0.5 * 10 - 32 * 0.125 = 11; b: 12 - 0 - 0 = 12
    a, b = Candidate("a", cached_blocks=20, backlog_blocks=10, batch=0.125), Candidate("b", cached_blocks=12)
    assert chosen(a, b, Candidate("c")) == "b"
    # one block more on a: 12 = 12, and a saves more
    a = Candidate("a", cached_blocks=21, backlog_blocks=10, batch=0.125)
    assert chosen(a, b, Candidate("c")) == "a"


def test_a_prefix_that_every_worker_has_does_not_count():
    # 100 system prompt blocks everywhere: 2 more on a do not outweigh a batch that is an eighth fuller (4 blocks).
    a, b = Candidate("a", cached_blocks=102, batch=0.125), Candidate("b", cached_blocks=100)
    assert chosen(a, b) == "b"


def test_a_session_spills_from_its_worker_when_that_is_overloaded():
    cached = 10_000
    assert chosen(Candidate("a", cached_blocks=cached, batch=0.25), Candidate("b")) == "a"
    assert chosen(Candidate("a", cached_blocks=cached, batch=0.28), Candidate("b")) == "b"
    assert chosen(Candidate("a", cached_blocks=cached, batch=0.75), Candidate("b", batch=0.5)) == "a"


def test_a_burst_of_one_session_stays_together_although_its_first_prompt_is_still_being_computed():
    # The first request charged a with 60 blocks; the following ones wait for the same 60 blocks.
    assert chosen(Candidate("a", cached_blocks=60, backlog_blocks=60), Candidate("b")) == "a"


def test_ties_go_round_robin():
    policy = Policy()
    idle = [Candidate(name) for name in "abc"]
    assert [policy.choose(idle).name for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_a_choice_without_a_tie_does_not_use_up_a_turn():
    policy = Policy()
    idle = [Candidate("a"), Candidate("b")]
    assert policy.choose(idle).name == "a"
    assert policy.choose([Candidate("a", cached_blocks=5), Candidate("b")]).name == "a"
    assert policy.choose(idle).name == "b"


candidates = st.lists(
    st.builds(
        Candidate,
        name=st.uuids().map(str),
        cached_blocks=st.integers(0, 1000),
        backlog_blocks=st.integers(0, 1000),
        batch=st.floats(0, 1.25),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.name,
)


@given(candidates)
def test_the_chosen_worker_is_never_beaten_in_every_respect(workers: list[Candidate]):
    winner = Policy().choose(workers)
    emptiest = min(worker.batch for worker in workers)
    assert winner.batch <= emptiest + 0.25
    for other in workers:
        dominates = (
            other.cached_blocks > winner.cached_blocks
            and other.backlog_blocks < winner.backlog_blocks
            and other.batch < winner.batch
        )
        assert not dominates


def test_leading_blocks_stop_at_the_first_gap():
    blocks = WorkerBlocks()
    blocks.report(["h1", "h2", "h4"], [])
    assert blocks.num_leading(["h1", "h2", "h3", "h4"]) == 2
    assert blocks.num_leading(["h2"]) == 1
    assert blocks.num_leading(["h9", "h1"]) == 0
    blocks.report([], ["h1"])
    assert blocks.num_leading(["h1", "h2"]) == 0


def test_promised_blocks_count_until_the_report_after_the_request_ended():
    blocks = WorkerBlocks()
    blocks.promise(["h1", "h2"])
    blocks.promise(["h1", "h3"])
    assert blocks.num_leading(["h1", "h2"]) == 2
    blocks.settle(["h1", "h2"])
    assert blocks.num_leading(["h1", "h2"]) == 2, "what the worker made of it is not known yet"
    blocks.report(["h1"], [])
    assert blocks.num_leading(["h1", "h2"]) == 1
    blocks.report([], ["h1"])
    assert blocks.num_leading(["h1", "h3"]) == 2, "the second request still promises both"


def prompt(system: str, session: str, num_turns: int) -> list[str]:
    """Chained hashes of a session's prompt: 3 blocks everyone has, then the session's own."""
    return [f"{system}{i}" for i in range(3)] + [f"{system}-{session}{i}" for i in range(num_turns)]


def test_sessions_whose_every_turn_ends_differently_stay_where_their_prefix_is():
    """Eight sessions, each a long prefix of its own with another tail at each turn: the coding-agent replay."""
    policy = Policy()
    workers = {"a": WorkerBlocks(), "b": WorkerBlocks()}
    homes: dict[str, set[str]] = {}
    load: Counter[str] = Counter()
    for turn in range(10):
        for session in "stuvwxyz":
            hashes = [f"{session}{i}" for i in range(62)] + [f"{session}-{turn}-{i}" for i in range(2)]
            options = [Candidate(n, blocks.num_leading(hashes), batch=load[n] / 100) for n, blocks in workers.items()]
            home = policy.choose(options).name
            workers[home].report(hashes, [])
            homes.setdefault(session, set()).add(home)
            load[home] += turn == 0
    assert all(len(home) == 1 for home in homes.values())
    assert load == {"a": 4, "b": 4}


def test_a_system_prompt_stops_to_pull_once_load_has_sent_a_session_elsewhere():
    policy = Policy()
    workers = {"a": WorkerBlocks(), "b": WorkerBlocks()}
    load: Counter[str] = Counter()
    for session in range(60):
        hashes = prompt("sys", str(session), 4)
        options = [Candidate(n, blocks.num_leading(hashes), batch=load[n] / 32) for n, blocks in workers.items()]
        home = policy.choose(options).name
        workers[home].report(hashes, [])
        load[home] += 1
    assert abs(load["a"] - load["b"]) <= 1
