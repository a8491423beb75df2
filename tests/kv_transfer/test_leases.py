"""What is held for a peer ends exactly once: by its end, by silence, or by the loss of the peer."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.leases import Lease, LeaseTable


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return LeaseTable(30.0, clock)


def test_lease_lapses_when_its_time_is_over_and_is_reported_once(table, clock):
    table.grant("decode-0", ("a", 0))
    clock.now = 129.9
    assert table.expired() == []
    clock.now = 130.0
    assert table.expired() == [Lease("decode-0", ("a", 0), 130.0)]
    assert table.expired() == []
    assert ("a", 0) not in table and len(table) == 0


def test_heartbeat_renews_every_lease_of_its_peer_and_of_no_other(table, clock):
    table.grant("decode-0", ("a", 0))
    table.grant("decode-1", ("b", 0))
    clock.now = 110.0
    table.grant("decode-0", ("c", 0))
    clock.now = 125.0
    table.renew("decode-0")
    assert [lease.deadline for lease in table.held_by("decode-0")] == [155.0, 155.0]
    clock.now = 154.0
    assert [lease.key for lease in table.expired()] == [("b", 0)]
    clock.now = 155.0
    assert [lease.key for lease in table.expired()] == [("a", 0), ("c", 0)]


def test_lease_granted_after_the_last_heartbeat_counts_from_its_grant(table, clock):
    table.grant("decode-0", ("a", 0))
    clock.now = 105.0
    table.renew("decode-0")
    clock.now = 120.0
    table.grant("decode-0", ("b", 0))
    clock.now = 140.0
    assert [lease.key for lease in table.expired()] == [("a", 0)]
    assert table.get(("b", 0)) == Lease("decode-0", ("b", 0), 150.0)


def test_end_is_idempotent_and_leaves_the_others(table, clock):
    table.grant("decode-0", ("a", 0))
    table.grant("decode-0", ("a", 1))
    assert table.end(("a", 0)) == Lease("decode-0", ("a", 0), 130.0)
    assert table.end(("a", 0)) is None
    assert table.end(("never", 0)) is None
    assert [lease.key for lease in table.held_by("decode-0")] == [("a", 1)]


def test_lost_peer_gives_back_its_leases_only(table):
    table.grant("decode-0", ("a", 0))
    table.grant("decode-1", ("b", 0))
    table.grant("decode-0", ("c", 0))
    assert [lease.key for lease in table.drop_peer("decode-0")] == [("a", 0), ("c", 0)]
    assert table.drop_peer("decode-0") == []
    assert ("b", 0) in table and len(table) == 1


def test_a_key_cannot_be_leased_twice(table):
    table.grant("decode-0", ("a", 0))
    with pytest.raises(AssertionError, match="leased to 'decode-0' already"):
        table.grant("decode-1", ("a", 0))


class LeasesAgainstAModel(RuleBasedStateMachine):
    """The table against a dictionary of deadlines kept lease by lease."""

    peers = st.sampled_from(["d0", "d1", "d2"])
    keys = st.tuples(st.sampled_from("abcd"), st.integers(0, 1))

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.table = LeaseTable(10.0, self.clock)
        self.deadlines = {}  # key -> (peer, deadline)

    @rule(peer=peers, key=keys)
    def grant(self, peer, key):
        if key not in self.deadlines:
            self.table.grant(peer, key)
            self.deadlines[key] = (peer, self.clock.now + 10.0)

    @rule(peer=peers)
    def renew(self, peer):
        self.table.renew(peer)
        for key, (owner, _) in self.deadlines.items():
            if owner == peer:
                self.deadlines[key] = (peer, self.clock.now + 10.0)

    @rule(key=keys)
    def end(self, key):
        assert (self.table.end(key) is not None) == (self.deadlines.pop(key, None) is not None)

    @rule(peer=peers)
    def drop(self, peer):
        gone = {key for key, (owner, _) in self.deadlines.items() if owner == peer}
        assert {lease.key for lease in self.table.drop_peer(peer)} == gone
        for key in gone:
            del self.deadlines[key]

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds):
        self.clock.now += seconds
        over = {key for key, (_, deadline) in self.deadlines.items() if deadline <= self.clock.now}
        assert {lease.key for lease in self.table.expired()} == over
        for key in over:
            del self.deadlines[key]

    @invariant()
    def same_leases(self):
        held = {lease.key: (lease.peer, lease.deadline) for p in ("d0", "d1", "d2") for lease in self.table.held_by(p)}
        assert held == self.deadlines
        assert len(self.table) == len(self.deadlines)


TestLeasesAgainstAModel = LeasesAgainstAModel.TestCase
TestLeasesAgainstAModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
