"""The decode worker process: a DecodeEngine, its channels to prefill workers, and perhaps a prefill engine of its
own."""

import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from decode_worker.blocks import OwnBlocks
from decode_worker.engine import DecodeEngine
from decode_worker.pace import Pace
from engine.config import SHARED_POOL_CHANNELS
from engine.kv_cache import KVCache
from engine.kv_pool import KVPool
from engine.pool_size import num_pool_blocks
from engine.protocol import Abort, Outputs, Peer, Peers, PoolCounts, Register, Submit, WorkerStats
from engine.worker import Worker, WorkerArguments, load_runner
from kv_transfer.channel import ChannelClosed, ChannelError, DecodeEnd, PrefillEnd
from kv_transfer.channels import get_channel
from kv_transfer.channels.local import local_pair
from kv_transfer.choose import resolve_channel
from kv_transfer.handoff import (
    CancelPrefill,
    GrantBlocks,
    Handoff,
    Heartbeat,
    Hello,
    PrefillFailed,
    PrefillRequest,
    Reclaimed,
    ToDecode,
    Welcome,
)
from prefill_worker.engine import PrefillEngine

log = logging.getLogger("decode")

RECONNECT_S = 0.5
LEASE_MARGIN = 0.8  # of the lease time: past it a silent peer is given up, before it gives us up


@dataclass
class Link:
    """A prefill worker as seen from here. `end` while connected, `ready` once it said Welcome; `heard` is when the
    last echoed heartbeat was sent (monotonic seconds); `lease_s` is the prefill worker's, which may be configured
    unlike ours."""

    peer: Peer
    lease_s: float
    end: DecodeEnd | None = None
    ready: bool = False
    refused: bool = False
    heard: float = 0.0
    retry_at: float = 0.0
    connecting: bool = False


@dataclass
class Connected:
    """Inbox item: an attempt to connect to a prefill worker ended."""

    link: Link
    end: DecodeEnd | None
    error: str = ""


class DecodeWorker(Worker):
    """With `prefill_workers: 0` both engines live here: colocated."""

    def __init__(self, arguments: WorkerArguments):
        arguments = replace(arguments, config=resolve_channel(arguments.config))
        super().__init__(arguments)
        config = self.config
        topology = config.topology
        self.runner = load_runner(arguments, decodes=True)
        self.resolved = config.on(self.runner.device)
        layout = self.runner.layout
        self.model = self.runner.info(self.name)
        num_blocks = num_pool_blocks(config, self.runner, self.model.max_model_len)
        self.model.max_model_len = min(self.model.max_model_len, num_blocks * layout.block_size)
        self.shares_pool = topology.channel in SHARED_POOL_CHANNELS
        self.hosts_prefill = topology.local_prefill_max_tokens != 0
        self.cache: KVCache | None = None
        if not self.shares_pool:
            self.runner.use_pool(KVPool.allocate(layout, num_blocks, self.runner.device))
            self.cache = KVCache(num_blocks, layout.block_size, config.kv.prefix_cache)
            log.info(
                "KV pool: %d blocks of %d tokens (%d MiB): %d tokens, %d requests of %d tokens at once",
                num_blocks,
                layout.block_size,
                num_blocks * layout.block_bytes >> 20,
                num_blocks * layout.block_size,
                min(self.resolved.max_running, num_blocks * layout.block_size // self.model.max_model_len),
                self.model.max_model_len,
            )
        self.num_blocks = 0 if self.shares_pool else num_blocks

        self.prefill: PrefillEngine | None = None
        self.prefill_end: PrefillEnd | None = None
        self.local_end: DecodeEnd | None = None
        if self.hosts_prefill:
            self.prefill_end, self.local_end = local_pair(self.runner.pool, self.inbox.wake, self.inbox.wake)
            self.prefill = PrefillEngine(
                self.runner,
                None,
                self.resolved.chunk_tokens,
                config.prefill.max_sequences,
                on_progress=lambda key, num_computed: self.engine.prefill_progress(key, num_computed),
            )
        limit = topology.local_prefill_max_tokens
        self.engine = DecodeEngine(
            self.runner,
            self.resolved.max_running,
            OwnBlocks(self.cache) if self.cache is not None else None,
            self.local_end,
            math.inf if limit == "unlimited" else limit,
            self.resolved.overlap,
        )
        self.pace = Pace(config.decode.tpot_target_ms)
        self.channel = get_channel(topology.channel)
        self.links: dict[str, Link] = {}
        self.next_heartbeat = 0.0

    # router

    def registration(self) -> Register:
        return Register(
            name=self.name,
            role="decode",
            epoch=self.epoch,
            pid=self.pid,
            model=self.model,
            num_blocks=self.num_blocks,
            max_running=self.resolved.max_running,
            channel=self.config.topology.channel,
            hosts_prefill=self.hosts_prefill and not self.shares_pool,
            device=self.runner.device,
        )

    def handle(self, message: Any) -> None:
        match message:
            case Submit():
                self.engine.submit(message)
            case Abort(request_id):
                self.engine.abort(request_id)
            case Peers(prefill=peers):
                self._update_links(peers)
            case Connected(link=link, end=end, error=error):
                self._connected(link, end, error)

    def take_outputs(self) -> Outputs | None:
        outputs = self.engine.take_outputs()
        return outputs if outputs.deltas or outputs.failures else None

    def prefill_peers(self) -> list[str]:
        recent = time.monotonic() - max(3 * self.config.transfer.heartbeat_s, 1.0)
        return [name for name, link in self.links.items() if link.ready and link.heard >= recent]

    def stats(self, with_index: bool) -> WorkerStats:
        counters: dict[str, float] = dict(self.engine.counters)
        if self.prefill is not None:
            counters |= self.prefill.counters
        stats = WorkerStats(
            running=len(self.engine.running) + len(self.engine.prefilling),
            waiting=len(self.engine.waiting),
            pool=PoolCounts(0, 0, 0, 0, 0),
            counters=counters,
        )
        if self.cache is not None:
            stats.pool = self.cache.counts()
            if with_index:
                stats.blocks_added = self.cache.indexed_hashes()
            else:
                stats.blocks_added, stats.blocks_removed = self.cache.drain_events()
        return stats

    def flush(self) -> int:
        return self.cache.flush() if self.cache is not None else 0

    def router_lost(self) -> None:
        self.engine.abort_all()

    def close(self) -> None:
        self.engine.abort_all()
        for link in self.links.values():
            if link.end is not None:
                link.end.close()

    # engine loop

    def turn(self) -> bool:
        """Prompt chunks are launched first, then the next decode step; the last step's tokens are on their way to
        clients before anything waits for the chunks."""
        for name, link in list(self.links.items()):
            self._poll(name, link)
        self._heartbeat()
        self.engine.admit()
        self.pace.begin()
        num_prefill = self._launch_prefill()
        worked = self.engine.step()
        if num_prefill and self.router is not None:
            self._publish()
        self._collect_prefill()
        self.pace.end(num_prefill, bool(self.engine.running))
        return worked or num_prefill > 0

    def _launch_prefill(self) -> int:
        """Start a chunk batch if there are prompts to compute. Returns its tokens."""
        if self.prefill is None or self.prefill_end is None:
            return 0
        for message in self.prefill_end.poll():
            match message:
                case PrefillRequest():
                    self.prefill.add(message, self.prefill_end)
                case CancelPrefill(key):
                    self.prefill.cancel(self.prefill_end.peer, key)
        return self.prefill.launch(self.pace.chunk_tokens() if self.engine.running else None)

    def _collect_prefill(self) -> None:
        if self.prefill is None or self.local_end is None:
            return
        self.prefill.collect()
        for answer in self.local_end.poll():
            self._answer(self.local_end, answer)

    def _answer(self, end: DecodeEnd, message: ToDecode) -> None:
        match message:
            case Handoff():
                self.engine.handoff(end, message)
            case PrefillFailed():
                self.engine.prefill_failed(message)

    # prefill workers

    def _update_links(self, peers: list[Peer]) -> None:
        """Follow the router's list: connect to new workers, let go of those that left or came back as another
        process."""
        current = {peer.name: peer for peer in peers}
        for name, link in list(self.links.items()):
            if current.get(name) != link.peer:
                self._lose(name, link, "it left")
                del self.links[name]
        for name, peer in current.items():
            self.links.setdefault(name, Link(peer, self.config.transfer.lease_s))

    def _open(self, link: Link) -> None:
        """In a thread of its own: a host that does not answer must not hold up the loop."""
        link.connecting = True
        hello = Hello(self.name, self.epoch, self.model)
        pool = None if self.shares_pool else self.runner.pool

        def attempt() -> None:
            try:
                end = self.channel.connect(link.peer.address, pool, hello, self.inbox.wake)
                self.inbox.put(Connected(link, end))
            except ChannelError as error:
                self.inbox.put(Connected(link, None, str(error)))

        threading.Thread(target=attempt, name=f"connect-{link.peer.name}", daemon=True).start()

    def _connected(self, link: Link, end: DecodeEnd | None, error: str) -> None:
        link.connecting = False
        if end is None:
            log.warning("prefill worker %s: %s", link.peer.name, error)
            link.retry_at = time.monotonic() + RECONNECT_S
        elif self.links.get(link.peer.name) is not link:
            end.close()
        else:
            link.end, link.heard = end, time.monotonic()

    def _poll(self, name: str, link: Link) -> None:
        if link.end is None:
            if not link.connecting and not link.refused and time.monotonic() >= link.retry_at:
                self._open(link)
            return
        try:
            messages = link.end.poll()
        except ChannelClosed as closed:
            self._lose(name, link, str(closed))
            return
        for message in messages:
            match message:
                case Welcome(refusal="") if not link.ready:
                    link.ready, link.lease_s = True, message.lease_s
                    self.engine.add_peer(name, link.end)
                    log.info("channel %s to prefill worker %s is open", self.channel.name, name)
                case Welcome(refusal=refusal):
                    log.error("prefill worker %s refuses this worker: %s", name, refusal)
                    link.refused = True
                    self._lose(name, link, refusal)
                    return
                case Heartbeat(sent):
                    link.heard = sent
                case GrantBlocks(block_ids):
                    self.engine.granted(name, block_ids)
                case Reclaimed():
                    self._lose(name, link, "its lease on this worker's blocks lapsed")
                    return
                case _:
                    self._answer(link.end, message)
        silent_s = time.monotonic() - link.heard
        if silent_s > LEASE_MARGIN * link.lease_s:
            self._lose(name, link, f"silent for {silent_s:.0f} s")

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now < self.next_heartbeat:
            return
        shortest_lease_s = min((link.lease_s for link in self.links.values()), default=math.inf)
        self.next_heartbeat = now + min(self.config.transfer.heartbeat_s, shortest_lease_s / 4)
        for link in self.links.values():
            if link.ready and link.end is not None:
                link.end.send(Heartbeat(now))

    def _lose(self, name: str, link: Link, reason: str) -> None:
        """Idempotent. The link may connect again, to the same process or its successor."""
        if link.end is None:
            self.engine.remove_peer(name, reason)
            return
        log.warning("prefill worker %s is lost: %s", name, reason)
        link.end.close()
        self.engine.remove_peer(name, reason)
        link.end, link.ready = None, False
        link.retry_at = time.monotonic() + RECONNECT_S
