"""Leases: what a prefill worker holds for decode workers, and until when.

    grant --> held --(heartbeat of the peer: renew)--> held --> end            the normal way
                 |--- no heartbeat for lease_s ---------------> expired        the peer is frozen or cut off
                 '--- connection lost ------------------------> drop_peer      the peer died

Whatever ends a lease, it ends once: exactly one of `end`, `expired` and `drop_peer` reports it.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Lease:
    """`key` names what is held (a TransferKey, or a peer's name for its grant of blocks); `deadline` is in the clock's
    seconds."""

    peer: str
    key: Hashable
    deadline: float


class LeaseTable:
    """Leases of one worker. Pure bookkeeping: the caller frees what an ended lease held. Not thread-safe.

    lease_s   seconds a lease lasts after it was granted or its peer was last heard
    clock     seconds, never going back
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic):
        self.lease_s = lease_s
        self._clock = clock
        self._granted: dict[str, dict[Hashable, float]] = {}  # peer -> key -> when, oldest first
        self._peers: dict[Hashable, str] = {}
        self._heard: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._peers

    def grant(self, peer: str, key: Hashable) -> None:
        """Start a lease. A key has at most one."""
        assert key not in self._peers, f"{key!r} is leased to {self._peers[key]!r} already"
        self._peers[key] = peer
        self._granted.setdefault(peer, {})[key] = self._clock()

    def get(self, key: Hashable) -> Lease | None:
        peer = self._peers.get(key)
        if peer is None:
            return None
        return Lease(peer, key, self._deadline(peer, self._granted[peer][key]))

    def held_by(self, peer: str) -> list[Lease]:
        """The peer's leases, oldest first."""
        return [Lease(peer, key, self._deadline(peer, when)) for key, when in self._granted.get(peer, {}).items()]

    def renew(self, peer: str) -> None:
        """The peer was heard: each lease it has now lasts `lease_s` from here."""
        if peer in self._granted:
            self._heard[peer] = self._clock()

    def end(self, key: Hashable) -> Lease | None:
        """End one lease. Idempotent: None when there is none (any more)."""
        lease = self.get(key)
        if lease is not None:
            self._forget(lease)
        return lease

    def expired(self) -> list[Lease]:
        """Leases whose deadline has passed; they end with this call. Costs O(peers + expired)."""
        now = self._clock()
        lapsed = []
        for peer, granted in self._granted.items():
            for key, when in granted.items():
                if self._deadline(peer, when) > now:
                    break  # granted later, so none of the rest can be over
                lapsed.append(Lease(peer, key, self._deadline(peer, when)))
        for lease in lapsed:
            self._forget(lease)
        return lapsed

    def drop_peer(self, peer: str) -> list[Lease]:
        """End all leases of a peer whose connection is lost. Idempotent."""
        leases = self.held_by(peer)
        for lease in leases:
            self._forget(lease)
        return leases

    def _deadline(self, peer: str, granted: float) -> float:
        return max(granted, self._heard.get(peer, granted)) + self.lease_s

    def _forget(self, lease: Lease) -> None:
        del self._peers[lease.key]
        del self._granted[lease.peer][lease.key]
        if not self._granted[lease.peer]:
            del self._granted[lease.peer]
            self._heard.pop(lease.peer, None)
