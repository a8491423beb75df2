"""Workers of any topology in one thread, stepped by hand: real engines, real channels, no router, no processes.

The cluster plays the router's part: it submits, aborts, and submits again what a lost worker could not finish.
"""

import time
from dataclasses import replace

from decode_worker.worker import DecodeWorker
from engine.config import DeploymentConfig
from engine.kv_cache import KVCache
from engine.protocol import Abort, Failure, Peer, Peers, Submit
from engine.request import Request, SamplingParams, TokenDelta
from engine.worker import WorkerArguments
from prefill_worker.worker import PrefillWorker

TOPOLOGIES: dict[str, dict] = {
    "colocated": {},
    "shm": {"prefill_workers": 1, "channel": "shm", "local_prefill_max_tokens": 0},
    "tcp": {"prefill_workers": 1, "channel": "tcp", "local_prefill_max_tokens": 0},
    "shm-conditional": {"prefill_workers": 1, "channel": "shm", "local_prefill_max_tokens": 9},
    "tcp-conditional": {"prefill_workers": 1, "channel": "tcp", "local_prefill_max_tokens": 9},
    "shm-2d": {"prefill_workers": 1, "decode_workers": 2, "channel": "shm", "local_prefill_max_tokens": 0},
    "shm-unlimited": {"prefill_workers": 1, "channel": "shm", "local_prefill_max_tokens": "unlimited"},
    "shm-2d-conditional": {"prefill_workers": 1, "decode_workers": 2, "channel": "shm", "local_prefill_max_tokens": 9},
    "tcp-2p2d": {"prefill_workers": 2, "decode_workers": 2, "channel": "tcp", "local_prefill_max_tokens": 0},
}


def make_config(
    topology: str = "colocated",
    *,
    block_size: int = 4,
    pool_tokens: int = 512,
    chunk_tokens: int = 16,
    max_sequences: int = 4,
    max_running: int = 8,
    max_model_len: int = 128,
    prefix_cache: bool = True,
    lease_s: float = 30.0,
    device: str = "cpu",
    overlap: bool = False,
    **more,
) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "device": device,
            "threads": 1,
            "deterministic": more.get("deterministic", False),
            "model": {"dtype": more.get("dtype", "float32"), "max_model_len": max_model_len},
            "kv": {"block_size": block_size, "pool_tokens": pool_tokens, "prefix_cache": prefix_cache},
            "topology": TOPOLOGIES[topology],
            "prefill": {"chunk_tokens": chunk_tokens, "max_sequences": max_sequences, **more.get("prefill", {})},
            "decode": {"max_running": max_running, "overlap": overlap, **more.get("decode", {})},
            "transfer": {"lease_s": lease_s, "heartbeat_s": 0.2},
        }
    )


def make_request(request_id: str, prompt: list[int], **sampling) -> Request:
    params = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return Request(request_id, prompt, SamplingParams(**params), arrival=time.time(), deadline=time.time() + 300)


class Cluster:
    """`deltas` and `failures` hold everything the decode workers reported, by request id."""

    def __init__(self, model_dir: str, config: DeploymentConfig):
        self.model_dir = str(model_dir)
        self.config = config
        self.requests: dict[str, Request] = {}
        self.placed: dict[str, tuple[int, int]] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.failures: dict[str, Failure] = {}
        self.prefill = [self._make(PrefillWorker, f"p{i}") for i in range(config.topology.prefill_workers)]
        self.decode = [self._make(DecodeWorker, f"d{i}") for i in range(config.topology.decode_workers)]
        self._introduce()
        if self.prefill:
            self.step_until(lambda: all(link.ready for d in self.decode for link in d.links.values()))

    def _make(self, kind, name: str):
        return kind(WorkerArguments(name, "", self.config, self.model_dir, False, "127.0.0.1"))

    def _introduce(self) -> None:
        peers = [Peer(worker.name, worker.server.address, worker.epoch) for worker in self.prefill if worker]
        for worker in self.decode:
            worker.handle(Peers(peers))

    def submit(self, request: Request, decode: int = 0, prefill: int = 0) -> None:
        self.requests[request.request_id] = request
        self.placed[request.request_id] = (decode, prefill)
        self.deltas.setdefault(request.request_id, [])
        name = f"p{prefill}" if self.prefill else None
        self.decode[decode].handle(Submit(request, name))

    def abort(self, request_id: str) -> None:
        self.decode[self.placed[request_id][0]].handle(Abort(request_id))
        self.requests.pop(request_id)

    def step(self) -> None:
        for worker in [*self.prefill, *self.decode]:
            for item in worker.inbox.take(0):
                worker.handle(item)
            worker.turn()
        for decode in self.decode:
            outputs = decode.take_outputs()
            if outputs is None:
                continue
            for delta in outputs.deltas:
                request = self.requests.get(delta.request_id)
                if request is not None and request.generation == delta.generation:
                    self.deltas[delta.request_id].append(delta)
            for failure in outputs.failures:
                self._failed(failure)

    def _failed(self, failure: Failure) -> None:
        request = self.requests.get(failure.request_id)
        if request is None or request.generation != failure.generation:
            return
        if failure.code != "worker_lost":
            self.failures[failure.request_id] = failure
            return
        again = replace(request, generation=request.generation + 1, output_token_ids=self.tokens(failure.request_id))
        self.submit(again, *self.placed[failure.request_id])

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def finished(self, request_id: str) -> bool:
        deltas = self.deltas[request_id]
        return request_id in self.failures or bool(deltas and deltas[-1].finish_reason)

    def step_until(self, condition, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "the cluster did not get there in time"
            self.step()

    def run(self, timeout_s: float = 60.0) -> None:
        """Step until every request that was not aborted has ended."""
        self.step_until(lambda: all(self.finished(request_id) for request_id in self.requests), timeout_s)

    def restart_prefill(self, index: int = 0) -> None:
        """The prefill worker dies without a word; another process takes its place."""
        self.prefill[index].close()
        self.prefill[index] = self._make(PrefillWorker, f"p{index}")
        self._introduce()

    def restart_decode(self, index: int = 0) -> None:
        """The decode worker dies without a word; its requests are submitted to its successor, as the router would."""
        old = self.decode[index]
        for link in old.links.values():
            if link.end is not None:
                link.end.close()
        self.decode[index] = self._make(DecodeWorker, f"d{index}")
        self._introduce()
        for request_id, request in list(self.requests.items()):
            if self.placed[request_id][0] == index and not self.finished(request_id):
                again = replace(request, generation=request.generation + 1, output_token_ids=self.tokens(request_id))
                self.submit(again, *self.placed[request_id])

    @property
    def caches(self) -> list[KVCache]:
        return [worker.cache for worker in [*self.prefill, *self.decode] if worker.cache is not None]

    def check_whole(self) -> None:
        """Nothing is held by anybody: every block is free or cached, on each pool."""
        self.step_until(lambda: all(c.counts().leased == c.counts().in_use == 0 for c in self.caches), 10.0)
        for cache in self.caches:
            cache.check()
            counts = cache.counts()
            assert counts.free + counts.cached == counts.total

    def close(self) -> None:
        for worker in [*self.decode, *self.prefill]:
            worker.close()


def run_alone(model_dir: str, request: Request, **config) -> list[int]:
    """The tokens of a request served alone by a cold colocated worker."""
    cluster = Cluster(model_dir, make_config("colocated", **config))
    try:
        cluster.submit(replace(request))
        cluster.run()
        assert request.request_id not in cluster.failures, cluster.failures
        return cluster.tokens(request.request_id)
    finally:
        cluster.close()
