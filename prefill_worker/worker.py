"""The prefill worker process: a PrefillEngine behind a channel server."""

import logging
from dataclasses import replace
from typing import Any

from engine.kv_cache import KVCache
from engine.pool_size import num_pool_blocks
from engine.protocol import ModelInfo, Register, WorkerStats
from engine.worker import Worker, WorkerArguments, load_runner
from kv_transfer.channel import ChannelClosed, PrefillEnd
from kv_transfer.channels import get_channel
from kv_transfer.choose import resolve_channel
from kv_transfer.handoff import (
    AskBlocks,
    CancelPrefill,
    Heartbeat,
    Hello,
    PrefillRequest,
    Reclaimed,
    ReturnBlocks,
    ToPrefill,
    TransferDone,
    Welcome,
)
from kv_transfer.leases import LeaseTable
from prefill_worker.engine import PrefillEngine
from prefill_worker.shared_pool import SharedPool

log = logging.getLogger("prefill")


class PrefillWorker(Worker):
    """Owns its pool and prefix index. Serves any number of decode workers."""

    def __init__(self, arguments: WorkerArguments):
        arguments = replace(arguments, config=resolve_channel(arguments.config))
        super().__init__(arguments)
        config = self.config
        self.channel = get_channel(config.topology.channel)
        self.runner = load_runner(arguments, decodes=False)
        layout = self.runner.layout
        self.model = self.runner.info(self.name)
        num_blocks = num_pool_blocks(config, self.runner, self.model.max_model_len)
        self.model.max_model_len = min(self.model.max_model_len, num_blocks * layout.block_size)
        pool = self.channel.make_pool(layout, num_blocks, self.runner.device)
        self.runner.use_pool(pool)
        self.cache = KVCache(num_blocks, layout.block_size, config.kv.prefix_cache)
        self.shared = SharedPool(self.cache) if self.channel.shares_pool else None
        self.engine = PrefillEngine(
            self.runner,
            self.cache,
            config.on(self.runner.device).chunk_tokens,
            config.prefill.max_sequences,
            self.shared,
        )
        welcome = Welcome(self.name, self.epoch, lease_s=config.transfer.lease_s, num_blocks=num_blocks)
        self.welcome = welcome
        self.server = self.channel.serve(pool, welcome, self.inbox.wake, arguments.host)
        self.ends: dict[str, PrefillEnd] = {}
        self.leases = LeaseTable(config.transfer.lease_s)
        self.num_accepted = 0
        self.num_reclaimed = 0
        log.info(
            "KV pool: %d blocks of %d tokens (%d MiB); channel %s at %s",
            num_blocks,
            layout.block_size,
            num_blocks * layout.block_bytes >> 20,
            self.channel.name,
            self.server.address,
        )

    def registration(self) -> Register:
        return Register(
            name=self.name,
            role="prefill",
            epoch=self.epoch,
            pid=self.pid,
            model=self.model,
            num_blocks=self.cache.num_blocks,
            max_running=self.config.prefill.max_sequences,
            channel=self.channel.name,
            channel_address=self.server.address,
            hosts_prefill=True,
            device=self.runner.device,
        )

    def handle(self, message: Any) -> None:
        """Requests come from decode workers; the router has nothing more to say."""

    def stats(self, with_index: bool) -> WorkerStats:
        added, removed = (self.cache.indexed_hashes(), []) if with_index else self.cache.drain_events()
        return WorkerStats(
            running=len(self.engine.running),
            waiting=len(self.engine.waiting),
            pool=self.cache.counts(),
            counters={**self.engine.counters, "leases_expired_total": self.num_reclaimed},
            blocks_added=added,
            blocks_removed=removed,
        )

    def flush(self) -> int:
        return self.cache.flush()

    def router_lost(self) -> None:
        """Decode workers end their requests themselves."""

    def close(self) -> None:
        self.server.close()

    def turn(self) -> bool:
        for end in self.server.accept():
            # A decode worker that comes back must not be mistaken for the one it was: each connection has its own name.
            self.num_accepted += 1
            end.peer = f"connection-{self.num_accepted}"
            self.ends[end.peer] = end
            self.leases.grant(end.peer, end.peer)
        for end in list(self.ends.values()):
            self._poll(end)
        for lease in self.leases.expired():
            self._reclaim(self.ends[lease.peer])
        if self.shared is not None:
            for peer, grant in self.shared.settle():
                self.ends[peer].send(grant)
        return self.engine.step()

    def _reclaim(self, end: PrefillEnd) -> None:
        """A decode worker is silent. In a shared pool it may be frozen in the middle of a step and write the rest of it
        when it thaws: its blocks are nobody else's until its connection closes, by itself at Reclaimed or by the
        end of its process."""
        self.num_reclaimed += 1
        reason = f"not heard for {self.leases.lease_s:g} s, everything it held is reclaimed"
        end.send(Reclaimed())
        if self.shared is None:
            self._drop(end, reason)
        else:
            log.warning("decode worker on %s: %s once its connection closes", end.peer, reason)
            self.engine.end_tasks(end.peer)

    def _poll(self, end: PrefillEnd) -> None:
        try:
            messages = end.poll()
        except ChannelClosed as closed:
            self._drop(end, str(closed))
            return
        for message in messages:
            self._answer(end, message)

    def _drop(self, end: PrefillEnd, reason: str) -> None:
        log.warning("decode worker on %s is gone: %s", end.peer, reason)
        self.leases.drop_peer(end.peer)
        del self.ends[end.peer]
        self.engine.drop_peer(end.peer)
        end.close()

    def _answer(self, end: PrefillEnd, message: ToPrefill) -> None:
        match message:
            case Hello():
                self._greet(end, message)
            case Heartbeat():
                self.leases.renew(end.peer)
                end.send(message)
            case PrefillRequest():
                self.engine.add(message, end)
            case CancelPrefill(key):
                self.engine.cancel(end.peer, key)
            case TransferDone(key):
                self.engine.transfer_done(end.peer, key)
            case AskBlocks(num_blocks) if self.shared is not None:
                end.send(self.shared.ask(end.peer, num_blocks))
            case ReturnBlocks() if self.shared is not None:
                self.shared.give_back(end.peer, message)

    def _greet(self, end: PrefillEnd, hello: Hello) -> None:
        """Accept a decode worker whose blocks are like ours, or say which field differs."""
        refusal = difference(self.model, hello.model)
        if refusal:
            log.error("decode worker %s refused: %s", hello.worker, refusal)
            end.send(replace(self.welcome, refusal=refusal))
            return
        log.info("decode worker %s connected (%s)", hello.worker, end.peer)
        end.send(self.welcome)


def difference(here: ModelInfo, there: ModelInfo) -> str:
    """Why two workers cannot exchange KV blocks: the first differing field with both values, or ""."""
    for name in ("fingerprint", "dtype", "block_size", "block_bytes", "layout", "vocab_size"):
        ours, theirs = getattr(here, name), getattr(there, name)
        if ours != theirs:
            return f"{name} differs: prefill worker has {ours}, decode worker has {theirs}"
    return ""
