"""Prometheus metrics. prometheus_client is an extra: without it the service runs and /metrics says how to get it."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import tally
from router.dispatcher import FleetSnapshot

if TYPE_CHECKING:
    from router.generation import Choice

PREFIX = "baton_"
SECONDS_TO_FIRST = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8, 1.2, 2, 3, 5, 8, 15, 30, 60)
SECONDS_A_TOKEN = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.5, 1, 2)
SECONDS_IN_ALL = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 8, 12, 20, 30, 60, 120, 300, 600)
POOL_STATES = ("free", "cached", "leased", "in_use")


class Metrics:
    """Everything /metrics shows, of one app. Raises ImportError without prometheus_client."""

    def __init__(self, snapshot: Callable[[], FleetSnapshot]):
        import prometheus_client as prometheus

        self._prometheus = prometheus
        self._registry = registry = prometheus.CollectorRegistry()
        registry.register(FleetCollector(snapshot))

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> tally.Histogram:
            made = tally.Histogram(PREFIX + name, text, bounds)
            registry.register(made)
            return made

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return prometheus.Counter(PREFIX + name, text, labels, registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", SECONDS_TO_FIRST
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds", "(last token - first token) / (tokens - 1) of a request", SECONDS_A_TOKEN
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two deliveries of tokens of a request", SECONDS_A_TOKEN
        )
        self.request_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end", SECONDS_IN_ALL
        )
        self.queue_time = histogram("request_queue_time_seconds", "Waiting for the prefill engine", SECONDS_TO_FIRST)
        self.prefill_time = histogram("request_prefill_time_seconds", "Inside the prefill engine", SECONDS_TO_FIRST)
        self.transfer_time = histogram(
            "kv_transfer_time_seconds",
            "From a prompt's last chunk computed to its blocks usable by decode",
            SECONDS_TO_FIRST,
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of sequences that began")
        self.cached_tokens = counter("cached_prompt_tokens_total", "Prompt tokens whose KV was reused, not computed")
        self.generation_tokens = tally.Counter(PREFIX + "generation_tokens", "Tokens generated for clients")
        registry.register(self.generation_tokens)
        self.finished = counter(
            "request_finished_total",
            "Sequences by how they ended: stop, length, abort (client gone), or a failure's code",
            ("finish_reason",),
        )
        self.prefills = counter("prefills_total", "Prompts by where they were prefilled", ("where",))
        self.transfer_blocks = counter("kv_transfer_blocks_total", "KV blocks moved over the channel")
        self.transfer_bytes = counter("kv_transfer_bytes_total", "KV bytes moved over the channel")
        self.http_requests = counter("http_requests_total", "HTTP answers by path and status", ("path", "status"))

    def timer(self, arrival: float) -> "SequenceTimer":
        """Follow one sequence. arrival: Unix time in seconds."""
        return SequenceTimer(self, arrival)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return self._prometheus.generate_latest(self._registry), self._prometheus.CONTENT_TYPE_LATEST


class SequenceTimer:
    def __init__(self, metrics: Metrics, arrival: float):
        self._metrics = metrics
        self._arrival = arrival
        self._first = self._last = 0.0

    def tokens(self, count: int) -> None:
        """`count` tokens were delivered now."""
        now = time.time()
        if self._first:
            self._metrics.inter_token_latency.observe(max(0.0, now - self._last))
        else:
            self._first = now
            self._metrics.time_to_first_token.observe(max(0.0, now - self._arrival))
        self._last = now
        self._metrics.generation_tokens.value += count

    def end(self, reason: str, choice: "Choice") -> None:
        metrics, prefill = self._metrics, choice.prefill
        metrics.finished.labels(reason).inc()
        metrics.request_latency.observe(max(0.0, time.time() - self._arrival))
        if choice.num_tokens > 1:
            metrics.time_per_output_token.observe(max(0.0, self._last - self._first) / (choice.num_tokens - 1))
        if prefill is not None:
            metrics.prompt_tokens.inc(len(choice.request.prompt_token_ids))
            metrics.cached_tokens.inc(prefill.num_cached_tokens)
            metrics.prefills.labels(prefill.where).inc()
            metrics.queue_time.observe(prefill.queue_ms / 1000)
            metrics.prefill_time.observe(prefill.prefill_ms / 1000)
            if prefill.where == "remote":
                metrics.transfer_time.observe(prefill.transfer_ms / 1000)
            metrics.transfer_blocks.inc(prefill.num_blocks_sent)
            metrics.transfer_bytes.inc(prefill.num_bytes_sent)


class FleetCollector:
    """What the workers and the dispatcher count, read when /metrics is asked. For each worker's pool
    free + cached + leased + in_use == baton_kv_blocks_capacity, always."""

    def __init__(self, snapshot: Callable[[], FleetSnapshot]):
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        fleet = self._snapshot()
        labels = ("worker", "role")

        def gauge(name: str, text: str, names: tuple[str, ...] = labels) -> Any:
            return GaugeMetricFamily(PREFIX + name, text, labels=names)

        running = gauge("requests_running", "Sequences in the worker's running batch")
        waiting = gauge("requests_waiting", "Sequences the worker has not started")
        assigned = gauge("requests_assigned", "Requests the router has on the worker")
        blocks = gauge("kv_blocks", "KV blocks of the worker's pool by state", (*labels, "state"))
        capacity = gauge("kv_blocks_capacity", "KV blocks of the worker's pool")
        counters: dict[str, Any] = {}
        for worker in fleet.workers:
            key = (worker.name, worker.role)
            running.add_metric(key, worker.running)
            waiting.add_metric(key, worker.waiting)
            assigned.add_metric(key, worker.assigned)
            capacity.add_metric(key, worker.pool.total)
            for state in POOL_STATES:
                blocks.add_metric((*key, state), getattr(worker.pool, state))
            for name, value in worker.counters.items():
                if name not in counters:
                    full_name = f"{PREFIX}worker_{name.removesuffix('_total')}"
                    counters[name] = CounterMetricFamily(full_name, f"The worker's own {name}", labels=labels)
                counters[name].add_metric(key, value)
        yield from (running, waiting, assigned, blocks, capacity, *counters.values())

        for name, text, value in (
            ("in_flight_requests", "Accepted requests that have not ended", fleet.requests_in_flight),
            ("unassigned_requests", "Accepted requests that are with no worker now", fleet.requests_waiting),
            ("in_flight_requests_limit", "In-flight requests at which new ones get a 429", fleet.in_flight_limit),
            ("draining", "1 while the server shuts down", int(fleet.draining)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in (
            ("retries", "Requests submitted again after their worker was lost", fleet.retries_total),
            ("stale_deltas", "Token messages of an earlier attempt, dropped", fleet.stale_deltas_total),
            ("workers_lost", "Worker connections that ended unasked", fleet.workers_lost_total),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)


class CountAnswers:
    """Middleware: counts answers by path and status. Paths that are no route count together."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]):
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        path = scope["path"] if scope["path"] in self._paths else "other"
        started = False

        async def counting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._metrics.http_requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:
            if not started:  # the answer to a bug is made outside every middleware
                self._metrics.http_requests.labels(path, "500").inc()
            raise
