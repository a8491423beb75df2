"""DecodeEngine: continuous batching over sequences whose prompts some prefill engine computes.

    waiting --reserve slot and blocks--> prefilling --Handoff--> running --stop rule, abort, failure--> gone
       ^                                     |                      |
       +------------- preempted, lost blocks, to be recomputed -----+

The decode side reserves first, so prefilled KV always has a place to go. When blocks run out the youngest sequence is
preempted: its blocks go back, and it is prefilled again with the tokens it already has. Draws depend on seed and
position only, so nothing a client sees changes.

With overlap the next step is launched before the last one's tokens are read: the runner keeps each sequence's last
token in its slot. A sequence that a stop rule ends is then computed once more than needed, and that token is dropped.
"""

import itertools
import time
from bisect import insort
from dataclasses import dataclass, field, replace

from decode_worker.blocks import BlockSource, GrantedBlocks, OwnBlocks
from engine.protocol import Failure, FailureCode, Outputs, Submit
from engine.request import Request, SampledToken, Sequence, TokenDelta
from engine.runner import ModelRunner
from engine.step import DecodeRow, Step
from kv_transfer.channel import DecodeEnd
from kv_transfer.handoff import CancelPrefill, Handoff, PrefillFailed, PrefillRequest, TransferDone, TransferKey
from prefill_worker.engine import BROKEN_LOGITS


@dataclass(eq=False)
class Entry:
    """One request inside the engine. `leg` numbers its prefills here, so that nothing of an earlier one can be
    mistaken for the current one's; blocks and messages carry (request id, leg). `num_computed` counts positions whose
    KV is there or being computed, `in_flight` the tokens being sampled."""

    request: Request
    sequence: Sequence
    prefill_worker: str | None
    leg: int = 0
    end: DecodeEnd | None = None
    source: BlockSource | None = None
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    slot: int = -1
    in_flight: int = 0
    delivered: bool = False

    @property
    def key(self) -> TransferKey:
        return (self.request.request_id, self.leg)

    @property
    def age(self) -> tuple[float, str]:
        return (self.request.arrival, self.request.request_id)


@dataclass
class PrefillPeer:
    """A prefill worker this engine can use. `granted` is set when its pool is the one both work in."""

    end: DecodeEnd
    granted: GrantedBlocks | None = None


class DecodeEngine:
    """Single-threaded: one engine loop calls every method; results collect in `outputs` until `take_outputs`.

    own         the worker's own pool; None when it works in a prefill worker's
    local       channel end of the prefill engine in this process, None without one
    local_prefill_max_tokens   uncached tokens up to which `local` is used although prefill workers exist
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_running: int,
        own: OwnBlocks | None,
        local: DecodeEnd | None,
        local_prefill_max_tokens: float,
        overlap: bool = False,
    ):
        self.runner = runner
        self.max_running = max_running
        self.own = own
        self.local = local
        self.local_prefill_max_tokens = local_prefill_max_tokens if local is not None else -1
        self.overlap = overlap
        self.free_slots = list(range(max_running - 1, -1, -1))
        self._launched: tuple[Step, list[tuple[Entry, int]]] | None = None
        self.peers: dict[str, PrefillPeer] = {}
        self.waiting: list[Entry] = []
        self.prefilling: dict[TransferKey, Entry] = {}
        self.running: list[Entry] = []
        self.entries: dict[str, Entry] = {}
        self.outputs = Outputs()
        self._legs = itertools.count(1)
        self.counters = {
            "decode_steps_total": 0,
            "generated_tokens_total": 0,
            "preemptions_total": 0,
            "local_prefills_total": 0,
            "remote_prefills_total": 0,
            "held_blocks_total": 0,
        }

    # requests

    def submit(self, message: Submit) -> None:
        """Queue a request. A request id that is already here is a newer attempt and replaces the older one."""
        self.abort(message.request.request_id)
        entry = Entry(message.request, Sequence(message.request), message.prefill_worker)
        self.entries[message.request.request_id] = entry
        insort(self.waiting, entry, key=lambda waiting: waiting.age)

    def abort(self, request_id: str) -> None:
        """Drop a request in whatever phase it is, on both sides. Idempotent."""
        entry = self.entries.get(request_id)
        if entry is not None:
            self._end(entry)

    def abort_all(self) -> None:
        for request_id in list(self.entries):
            self.abort(request_id)

    def take_outputs(self) -> Outputs:
        outputs, self.outputs = self.outputs, Outputs()
        return outputs

    # prefill side

    def add_peer(self, name: str, end: DecodeEnd) -> None:
        """A prefill worker is ready. With a shared-pool channel its pool becomes the one to decode in."""
        granted = None
        if end.pool is not None:
            granted = GrantedBlocks(end)
            self.runner.use_pool(end.pool)
        self.peers[name] = PrefillPeer(end, granted)

    def remove_peer(self, name: str, reason: str) -> None:
        """A prefill worker is gone. What depended on it fails with `worker_lost`; everything else goes on."""
        peer = self.peers.pop(name, None)
        for entry in list(self.entries.values()):
            lost_blocks = peer is not None and peer.granted is not None and entry.source is peer.granted
            if lost_blocks:
                entry.source = None  # they went with their owner
            waits_for_it = entry.prefill_worker == name and entry in self.waiting
            if lost_blocks or waits_for_it or (peer is not None and entry.end is peer.end):
                self._fail(entry, "worker_lost", f"prefill worker {name} was lost: {reason}")
        if peer is not None and peer.granted is not None:
            self.runner.drop_pool()

    def granted(self, name: str, block_ids: list[int]) -> None:
        """The owner of the shared pool answers an ask for append blocks."""
        peer = self.peers.get(name)
        if peer is not None and peer.granted is not None:
            peer.granted.granted(block_ids)

    def handoff(self, end: DecodeEnd, handoff: Handoff) -> None:
        """Adopt a prefilled sequence: its blocks, its first token, its sampler state."""
        entry = self.prefilling.get(handoff.key)
        if entry is None or entry.end is not end:
            self._decline(end, handoff)
            return
        if handoff.first_token is None:
            self._prefill_rest(entry, handoff)
            return
        del self.prefilling[entry.key]
        entry.end = None
        self.counters["local_prefills_total" if end is self.local else "remote_prefills_total"] += 1
        if handoff.block_table:
            entry.block_table = handoff.block_table
        if end is not self.local:
            end.forget(entry.key)
            if handoff.num_blocks:
                end.send(TransferDone(entry.key))
        entry.num_computed = len(entry.sequence) if handoff.num_blocks or handoff.block_table else 0
        if entry.source is self.own and entry.num_computed:
            assert self.own is not None
            self.own.commit(entry.key, entry.sequence.token_ids, entry.num_computed, entry.request.cache_salt)
        self._deliver(entry, handoff.first_token, handoff)
        if entry.sequence.finish_reason is None:
            entry.slot = self.free_slots.pop()
            self.runner.join(entry.slot, entry.sequence, entry.block_table)
            insort(self.running, entry, key=lambda running: running.age)

    def prefill_failed(self, message: PrefillFailed) -> None:
        entry = self.prefilling.get(message.key)
        if entry is not None:
            self._fail(entry, message.code, message.message)

    def prefill_progress(self, key: TransferKey, num_computed: int) -> None:
        """The local prefill engine filled blocks of ours: index them, so that later requests find them at once."""
        entry = self.prefilling.get(key)
        if entry is not None and entry.source is self.own and self.own is not None:
            self.own.commit(key, entry.sequence.token_ids, num_computed, entry.request.cache_salt)

    # the loop

    def admit(self) -> None:
        """waiting -> prefilling, oldest first, while slots and blocks last."""
        for entry in list(self.waiting):
            if len(self.running) + len(self.prefilling) >= self.max_running:
                return
            if not self._start_leg(entry):
                return

    def step(self) -> bool:
        """One token for each running sequence that has room for it. Returns whether any was launched or read."""
        self._drop_overdue()
        batch = self._make_room()
        for peer in self.peers.values():
            if peer.granted is not None:
                peer.granted.restock(sum(entry.source is peer.granted for entry in self.running))
        before, self._launched = self._launched, self._launch(batch) if batch else None
        if before is not None:
            self._collect(*before)
        if self._launched is not None and not self.overlap:
            launched, self._launched = self._launched, None
            self._collect(*launched)
        return bool(batch) or before is not None

    def _launch(self, batch: list[Entry]) -> tuple[Step, list[tuple[Entry, int]]]:
        rows = []
        for entry in batch:
            num_outputs = len(entry.sequence.output_token_ids) + entry.in_flight
            rows.append(DecodeRow(entry.slot, entry.sequence, entry.num_computed, num_outputs, entry.block_table))
            entry.num_computed += 1
            entry.in_flight += 1
        self.counters["decode_steps_total"] += 1
        return self.runner.decode(rows), [(entry, entry.leg) for entry in batch]

    def _collect(self, step: Step, batch: list[tuple[Entry, int]]) -> None:
        """Tokens of sequences that have left the batch since are dropped."""
        for (entry, leg), token in zip(batch, step.wait()):
            if entry.leg != leg or entry.slot < 0:
                continue
            entry.in_flight -= 1
            if token is None:
                self._fail(entry, "internal", BROKEN_LOGITS)
            else:
                self._deliver(entry, token, None)

    # one leg: reserve, prefill, adopt

    def _start_leg(self, entry: Entry) -> bool:
        """False: blocks are short, stop admitting. A leg that cannot start for another reason stays waiting."""
        entry.leg = next(self._legs)
        peer = self._peer_of(entry)
        if self.own is None:
            if peer is not None and peer.granted is not None:
                if peer.granted.short:
                    return False
                entry.source = peer.granted
                local_max = int(min(self.local_prefill_max_tokens, 2**31 - 1))
                self._request_prefill(
                    entry, peer.end, PrefillRequest(self._leg_request(entry), local_max_tokens=max(0, local_max))
                )
            return True
        if peer is None and self.local is None:
            return True
        token_ids = entry.sequence.token_ids
        reuse = entry.sequence.sampling.prompt_logprobs is None
        allocation = self.own.reserve(entry.key, token_ids, entry.request.cache_salt, reuse)
        if allocation is not None and not self._leaves_room():
            self.own.release(entry.key, [], [], 0, "")
            allocation = None
        if allocation is None:
            if not self.running and not self.prefilling:
                self._fail(entry, "too_long", f"{len(token_ids)} tokens do not fit the worker's KV pool")
                return True
            return False
        entry.source = self.own
        entry.block_table = list(allocation.block_table)
        num_cached = allocation.num_cached_tokens
        request = self._leg_request(entry)
        if peer is None or len(token_ids) - num_cached <= self.local_prefill_max_tokens:
            assert self.local is not None
            self._request_prefill(
                entry,
                self.local,
                PrefillRequest(request, block_table=entry.block_table, num_cached_tokens=num_cached),
            )
        else:
            num_held = num_cached // self.runner.layout.block_size
            self.counters["held_blocks_total"] += num_held
            peer.end.expect(entry.key, entry.block_table)
            self._request_prefill(entry, peer.end, PrefillRequest(request, num_held_blocks=num_held))
        return True

    def _peer_of(self, entry: Entry) -> PrefillPeer | None:
        """The prefill worker the router chose or, if that is not connected (any more), another one."""
        if entry.prefill_worker is None:
            return None
        return self.peers.get(entry.prefill_worker) or next(iter(self.peers.values()), None)

    def _leaves_room(self) -> bool:
        """Running sequences keep a block each to grow into, or admitting would only cause preemption."""
        assert self.own is not None
        return not self.running or self.own.cache.num_available >= len(self.running)

    def _leg_request(self, entry: Entry) -> Request:
        return replace(entry.request, generation=entry.leg, output_token_ids=list(entry.sequence.output_token_ids))

    def _request_prefill(self, entry: Entry, end: DecodeEnd, message: PrefillRequest) -> None:
        self.waiting.remove(entry)
        self.prefilling[entry.key] = entry
        entry.end = end
        end.send(message)

    def _prefill_rest(self, entry: Entry, handoff: Handoff) -> None:
        """Shared pool: the owner found the prompt cached up to a few tokens and left those to us."""
        assert self.local is not None
        entry.block_table = handoff.block_table
        entry.end = self.local
        self.local.send(
            PrefillRequest(
                self._leg_request(entry), block_table=entry.block_table, num_cached_tokens=handoff.num_computed
            )
        )

    def _decline(self, end: DecodeEnd, handoff: Handoff) -> None:
        """A handoff nobody waits for any more: what came with it goes back."""
        end.forget(handoff.key)
        peer = next((peer for peer in self.peers.values() if peer.end is end), None)
        if peer is not None and peer.granted is not None and handoff.block_table:
            peer.granted.release(handoff.key, handoff.block_table, [], 0, "")
        elif end is not self.local:
            end.send(TransferDone(handoff.key))

    # tokens

    def _deliver(self, entry: Entry, token: SampledToken, handoff: Handoff | None) -> None:
        """The bookkeeping of one token, the same for the first and every later one."""
        sequence = entry.sequence
        sequence.append(token.token_id)
        self.counters["generated_tokens_total"] += 1
        delta = TokenDelta(
            entry.request.request_id,
            entry.request.generation,
            [token.token_id],
            logprobs=[token.logprobs] if token.logprobs is not None else None,
            finish_reason=sequence.finish_reason,
            stop_token_id=sequence.stop_token_id,
        )
        if handoff is not None and not entry.delivered:
            delta.prefill = handoff.report
            delta.prompt_logprobs = handoff.prompt_logprobs
        entry.delivered = True
        self.outputs.deltas.append(delta)
        if sequence.finish_reason is not None:
            self._end(entry)

    def _make_room(self) -> list[Entry]:
        """APPENDING: sequences that have a block for their next token's KV, oldest served first."""
        block_size = self.runner.layout.block_size
        batch = []
        for entry in list(self.running):
            most = entry.request.sampling.max_tokens
            if len(entry.sequence.output_token_ids) + entry.in_flight >= most:
                continue  # its last token is on its way
            while entry in self.running:
                if entry.num_computed < len(entry.block_table) * block_size:
                    batch.append(entry)
                    break
                assert entry.source is not None
                grown = entry.source.grow(entry.key, entry.block_table)
                if grown is None:
                    break
                if not grown:
                    self._preempt_youngest()
        return [entry for entry in batch if entry in self.running]

    def _preempt_youngest(self) -> None:
        """Send the youngest sequence back to waiting, be it the only one. What that one lacks may be with another
        decode worker of a shared pool, or in cached copies of its own blocks, kept from eviction by those of its
        blocks that follow them; prefilled again it uses the copies. Whether it fits at all shows at its reservation."""
        youngest = max([*self.running, *self.prefilling.values()], key=lambda entry: entry.age)
        self.counters["preemptions_total"] += 1
        self._let_go(youngest)
        insort(self.waiting, youngest, key=lambda waiting: waiting.age)

    # the ways out

    def _let_go(self, entry: Entry) -> None:
        """Leave the current phase: cancel a prefill, give the blocks back. Idempotent."""
        if entry in self.waiting:
            self.waiting.remove(entry)
        if entry in self.running:
            self.running.remove(entry)
            self.runner.leave(entry.slot)
            self.free_slots.append(entry.slot)
        if self.prefilling.pop(entry.key, None) is not None and entry.end is not None:
            entry.end.send(CancelPrefill(entry.key))
            entry.end.forget(entry.key)
            self.runner.settle()
        returns_later = entry.end is not None and isinstance(entry.source, GrantedBlocks) and not entry.block_table
        if entry.source is not None and not returns_later:
            entry.source.release(
                entry.key, entry.block_table, entry.sequence.token_ids, entry.num_computed, entry.request.cache_salt
            )
        entry.end, entry.source, entry.block_table, entry.num_computed = None, None, [], 0
        entry.slot, entry.in_flight = -1, 0

    def _end(self, entry: Entry) -> None:
        """The one way out: finished, aborted or failed. Idempotent."""
        self._let_go(entry)
        if self.entries.get(entry.request.request_id) is entry:
            del self.entries[entry.request.request_id]

    def _fail(self, entry: Entry, code: FailureCode, message: str) -> None:
        self.outputs.failures.append(Failure(entry.request.request_id, entry.request.generation, code, message))
        self._end(entry)

    def _drop_overdue(self) -> None:
        now = time.time()
        for entry in [entry for entry in self.entries.values() if entry.request.deadline < now]:
            self._fail(entry, "deadline", "deadline passed")
