"""A dispatcher without workers: each request's token deltas are a script the test writes."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.protocol import ModelInfo, PoolCounts
from engine.request import FinishReason, PrefillReport, Request, TokenDelta, TokenLogprobs
from router.dispatcher import FleetSnapshot, GenerationError, HealthReport, TokenStream, WorkerHealth, WorkerSnapshot

Step = TokenDelta | GenerationError | float | asyncio.Event
"""A delta to deliver, a failure, a pause in seconds, or something to wait for."""

Script = Callable[[Request], Iterable[Step]]


def model_info(vocab_size: int = 512, max_model_len: int = 256, eos_token_ids: tuple[int, ...] = (2, 0)) -> ModelInfo:
    return ModelInfo("tiny", "fingerprint", "float32", 16, 1024, "layout", vocab_size, max_model_len, [*eos_token_ids])


def deltas(
    request: Request,
    token_ids: list[int],
    *,
    sizes: Iterable[int] = (),
    finish_reason: FinishReason | None = "length",
    stop_token_id: int | None = None,
    prefill: PrefillReport | None = None,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
) -> list[Step]:
    """Token ids as deltas of the given sizes (then of one token), as a worker would send them. Logprobs, if asked for,
    are -0.25 for the sampled token, and -1, -2, ... for the tokens with the ids 10, 11, ..."""
    top = request.sampling.logprobs
    remaining, steps = list(token_ids), []
    size_of = iter(sizes)
    while remaining:
        taken = remaining[: next(size_of, 1)]
        remaining = remaining[len(taken) :]
        delta = TokenDelta(request.request_id, request.generation, taken)
        if top is not None:
            best = [(10 + rank, -1.0 - rank) for rank in range(top)]
            delta.logprobs = [TokenLogprobs(token_id, -0.25, best) for token_id in taken]
        steps.append(delta)
    steps[0].prefill = prefill or PrefillReport(num_prompt_tokens=len(request.prompt_token_ids))
    steps[0].prompt_logprobs = prompt_logprobs
    steps[-1].finish_reason = finish_reason
    steps[-1].stop_token_id = stop_token_id
    return steps


@dataclass
class FakeDispatcher:
    """refusal: raised by the next submits. closed: ids of requests closed before their end."""

    script: Script
    model: ModelInfo | None = field(default_factory=model_info)
    refusal: Exception | None = None
    requests: list[Request] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    health_report: HealthReport | None = None
    health_delay_s: float = 0.0
    num_flushed: int = 0
    _tasks: set = field(default_factory=set)

    def submit(self, requests: list[Request]) -> list[TokenStream]:
        if self.refusal is not None:
            raise self.refusal
        self.requests += requests
        return [self._start(request) for request in requests]

    def _start(self, request: Request) -> TokenStream:
        async def play() -> None:
            for step in self.script(request):
                await asyncio.sleep(0)
                if isinstance(step, TokenDelta):
                    stream.put(step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    stream.fail(step)

        stream = TokenStream(request.request_id, lambda: self.closed.append(request.request_id))
        task = asyncio.get_running_loop().create_task(play())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def health(self, timeout_s: float) -> HealthReport:
        await asyncio.sleep(self.health_delay_s)
        return self.health_report or HealthReport(True, False, [WorkerHealth("d0", "decode", True, 0.5)])

    async def flush(self) -> int:
        self.num_flushed += 1
        return 7

    def snapshot(self) -> FleetSnapshot:
        worker = WorkerSnapshot(
            "d0", "decode", 2, 1, PoolCounts(10, 4, 3, 1, 2), {"decode_steps_total": 5.0}, assigned=3
        )
        return FleetSnapshot([worker], requests_in_flight=3, requests_waiting=0, in_flight_limit=40, retries_total=6)
