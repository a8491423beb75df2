"""PrefillEngine: prompts in, KV blocks and a first token out.

Each `step` runs one chunk batch: up to `chunk_tokens` prompt tokens of up to `max_sequences` prompts, oldest first.
What a task's blocks are, and who owns them, depends on where they came from:

    block_table given    the decode side reserved them in its own pool (local channel); they stay its property
    shared pool          acquired here, and handed over by id with the Handoff
    two pools            acquired here; computed blocks move while later chunks still run; LEASED until the other side
    has them
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv_cache import KVCache
from engine.protocol import FailureCode
from engine.request import PrefillReport, SampledToken, Sequence, TokenLogprobs
from engine.runner import ModelRunner, SequenceChunk
from engine.sampling import prompt_logprobs
from engine.step import Step
from kv_transfer.channel import PrefillEnd
from kv_transfer.handoff import Handoff, PrefillFailed, PrefillRequest, SamplerState, TransferKey
from prefill_worker.shared_pool import SharedPool

BROKEN_LOGITS = "the model's output is not finite"
MOST_LOGITS_ROWS = 256
"""Rows of a chunk whose logits are all wanted: a row is as long as the vocabulary."""

TaskKey = tuple[str, TransferKey]


@dataclass(eq=False)
class Task:
    """One prompt on its way through the engine. `token_ids` are all tokens to compute: the prompt, and what an earlier
    attempt already generated after it."""

    message: PrefillRequest
    end: PrefillEnd
    sequence: Sequence
    token_ids: list[int]
    queued_at: float
    started_at: float = 0.0
    block_table: list[int] = field(default_factory=list)
    owns_blocks: bool = False
    num_computed: int = 0
    num_sent_blocks: int = 0
    logprobs: list[TokenLogprobs | None] | None = None
    report: PrefillReport = field(default_factory=PrefillReport)

    @property
    def key(self) -> TransferKey:
        return self.message.key

    @property
    def holder(self) -> str:
        return f"prefill/{self.end.peer}/{self.key[0]}/{self.key[1]}"

    @property
    def ends_at_first_token(self) -> bool:
        return len(self.sequence.output_token_ids) + 1 >= self.sequence.sampling.max_tokens


class PrefillEngine:
    """Runs prefill tasks on one model runner. Single-threaded: one engine loop calls every method.

    cache        allocator and prefix index of the runner's pool; None when every task brings its own blocks
    shared       the ledger of a pool shared with decode workers, None otherwise
    on_committed called with (holder's) progress so that a decode side can index blocks it lent (local channel)
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache | None,
        chunk_tokens: int,
        max_sequences: int,
        shared: SharedPool | None = None,
        on_progress: Callable[[TransferKey, int], None] | None = None,
    ):
        self.runner = runner
        self.cache = cache
        self.chunk_tokens = chunk_tokens
        self.max_sequences = max_sequences
        self.shared = shared
        self.on_progress = on_progress
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []
        self.tasks: dict[TaskKey, Task] = {}
        self.leases: dict[TaskKey, PrefillEnd] = {}
        self.ending_leases: set[TaskKey] = set()
        self._launched: tuple[Step, list[SequenceChunk], list[Task]] | None = None
        self.counters = {
            "prefill_tokens_total": 0,
            "prefill_cached_tokens_total": 0,
            "prefill_steps_total": 0,
            "prefills_total": 0,
            "transferred_blocks_total": 0,
            "transferred_bytes_total": 0,
        }

    def add(self, message: PrefillRequest, end: PrefillEnd) -> None:
        """Queue a prompt. The answer, a Handoff or a PrefillFailed, goes to `end`."""
        sequence = Sequence(message.request)
        task = Task(message, end, sequence, sequence.token_ids, queued_at=time.monotonic())
        self.tasks[end.peer, message.key] = task
        self.waiting.append(task)

    def cancel(self, peer: str, key: TransferKey) -> None:
        """The decode side gave the request up, in whatever phase it is. Idempotent."""
        task = self.tasks.get((peer, key))
        if task is not None:
            self._forget(task)
        self._end_lease(peer, key, abandon=True)

    def transfer_done(self, peer: str, key: TransferKey) -> None:
        """Every block arrived on the other side. Idempotent."""
        self._end_lease(peer, key, abandon=False)

    def drop_peer(self, peer: str) -> None:
        """A decode worker is gone: everything done or held for it ends. Idempotent."""
        self.end_tasks(peer)
        if self.shared is not None:
            self.shared.drop_peer(peer)

    def end_tasks(self, peer: str) -> None:
        """Nothing more is computed or moved for this decode worker. What it was lent of a shared pool stays its own."""
        for task in [task for (owner, _), task in self.tasks.items() if owner == peer]:
            self._forget(task)
        for owner, key in [lease for lease in self.leases if lease[0] == peer]:
            self._end_lease(owner, key, abandon=True)
        if self.shared is not None:
            self.shared.owed.pop(peer, None)

    def step(self) -> bool:
        """Run one chunk batch. Returns whether there was anything to compute."""
        num_tokens = self.launch()
        self.collect()
        return num_tokens > 0

    def launch(self, max_tokens: int | None = None) -> int:
        """Start one chunk batch, of up to `max_tokens` if that is less than chunk_tokens. `collect` must follow before
        the next. Returns the number of tokens in it."""
        assert self._launched is None, "the last chunk batch was not collected"
        self._settle_leases()
        self._drop_overdue()
        self._admit()
        chunks, tasks = self._plan(self.chunk_tokens if max_tokens is None else min(max_tokens, self.chunk_tokens))
        if not chunks:
            return 0
        self._launched = (self.runner.prefill(chunks, [task.sequence for task in tasks]), chunks, tasks)
        self.counters["prefill_steps_total"] += 1
        return sum(len(chunk.token_ids) for chunk in chunks)

    def collect(self) -> None:
        """Wait for the chunk batch that was started, if any, and pass on what it completed."""
        if self._launched is None:
            return
        (step, chunks, tasks), self._launched = self._launched, None
        tokens = step.wait()
        for index, (task, chunk, token) in enumerate(zip(tasks, chunks, tokens)):
            self.counters["prefill_tokens_total"] += len(chunk.token_ids)
            if self.tasks.get((task.end.peer, task.key)) is not task:
                continue  # given up in the meantime
            task.num_computed += len(chunk.token_ids)
            if chunk.logits == "all":
                self._collect_logprobs(task, chunk, step.logits[index])
            self._after_chunk(task)
            if task.num_computed < len(task.token_ids):
                continue
            if token is None:
                self._fail(task, "internal", BROKEN_LOGITS)
            else:
                self._finish(task, token)

    def _admit(self) -> None:
        if self.shared is not None and self.shared.owed:
            return
        while self.waiting and len(self.running) < self.max_sequences:
            task = self.waiting[0]
            needed = self._blocks_needed(task)
            if self.cache is not None and not task.message.block_table and needed > self.cache.num_blocks:
                self._fail(task, "too_long", f"prompt needs {needed} KV blocks, the pool has {self.cache.num_blocks}")
                continue
            if not self._take_blocks(task):
                return
            self.waiting.popleft()
            self.running.append(task)
            task.started_at = time.monotonic()
            if self._left_to_decode(task):  # which counts and reports it
                self.running.remove(task)
                self._hand_over(task, None)
                continue
            self.counters["prefills_total"] += 1
            self.counters["prefill_cached_tokens_total"] += task.num_computed
            task.report = PrefillReport(
                where="local" if task.message.block_table else "remote",
                num_prompt_tokens=len(task.sequence.prompt_token_ids),
                num_cached_tokens=min(task.num_computed, len(task.sequence.prompt_token_ids)),
                num_blocks_held=task.message.num_held_blocks,
                queue_ms=(task.started_at - task.queued_at) * 1000,
            )
            self._send_computed(task)

    def _take_blocks(self, task: Task) -> bool:
        """Give the task its block table, FREE/CACHED -> FILLING. False: blocks are short now, try again later."""
        message = task.message
        if message.block_table:
            task.block_table, task.num_computed = list(message.block_table), message.num_cached_tokens
            return True
        assert self.cache is not None, "task without blocks on an engine without a pool"
        allocation = self.cache.acquire(
            task.holder,
            task.token_ids,
            self._tokens_to_hold(task),
            salt=message.request.cache_salt,
            reuse=message.request.sampling.prompt_logprobs is None,
        )
        if allocation is None:
            return False
        task.owns_blocks = True
        task.block_table, task.num_computed = list(allocation.block_table), allocation.num_cached_tokens
        return True

    def _tokens_to_hold(self, task: Task) -> int:
        """On a shared pool the sequence goes on in these blocks, so there is room for the first token's KV."""
        return len(task.token_ids) + (1 if self.shared is not None else 0)

    def _blocks_needed(self, task: Task) -> int:
        return -(-self._tokens_to_hold(task) // self.runner.layout.block_size)

    def _left_to_decode(self, task: Task) -> bool:
        """Shared pool: what is uncached is short enough for the decode worker to compute itself."""
        uncached = len(task.token_ids) - task.num_computed
        return self.shared is not None and not task.message.block_table and uncached <= task.message.local_max_tokens

    def _plan(self, budget: int) -> tuple[list[SequenceChunk], list[Task]]:
        chunks, tasks = [], []
        for task in self.running:
            if budget == 0:
                break
            start = task.num_computed
            count = min(budget, len(task.token_ids) - start)
            wants_all = task.sequence.sampling.prompt_logprobs is not None and not task.message.request.output_token_ids
            if wants_all:
                count = min(count, MOST_LOGITS_ROWS)
            budget -= count
            last = start + count == len(task.token_ids)
            chunks.append(
                SequenceChunk(
                    token_ids=task.token_ids[start : start + count],
                    start=start,
                    block_table=task.block_table,
                    logits="all" if wants_all else "last" if last else "none",
                )
            )
            tasks.append(task)
        return chunks, tasks

    def _collect_logprobs(self, task: Task, chunk: SequenceChunk, logits) -> None:
        if task.logprobs is None:
            task.logprobs = [None]
        following = task.token_ids[chunk.start + 1 : chunk.start + len(chunk.token_ids) + 1]
        top = task.sequence.sampling.prompt_logprobs or 0
        task.logprobs += prompt_logprobs(logits[: len(following)], following, top)

    def _after_chunk(self, task: Task) -> None:
        """Index the blocks that are full now and let them travel."""
        if task.owns_blocks:
            assert self.cache is not None
            self.cache.commit(task.holder, task.token_ids, task.num_computed, task.message.request.cache_salt)
            self._send_computed(task)
        elif self.on_progress is not None:
            self.on_progress(task.key, task.num_computed)

    def _send_computed(self, task: Task) -> None:
        """Two pools: FILLING -> FILLING + LEASED for each block that will not change any more."""
        if not task.owns_blocks or self.shared is not None or task.ends_at_first_token:
            return
        assert self.cache is not None
        done = task.num_computed == len(task.token_ids)
        block_size = self.cache.block_size
        ready = -(-task.num_computed // block_size) if done else task.num_computed // block_size
        first = max(task.num_sent_blocks, task.message.num_held_blocks)
        if ready <= first:
            return
        blocks = task.block_table[first:ready]
        self.cache.lease(self._lease_id(task.end.peer, task.key), blocks)
        self.leases[task.end.peer, task.key] = task.end
        num_bytes = task.end.send_blocks(task.key, first, blocks)
        task.num_sent_blocks = ready
        self.counters["transferred_blocks_total"] += len(blocks)
        self.counters["transferred_bytes_total"] += num_bytes

    def _finish(self, task: Task, token: SampledToken) -> None:
        task.report.prefill_ms = (time.monotonic() - task.started_at) * 1000
        task.sequence.append(token.token_id)
        self.running.remove(task)
        self._hand_over(task, token)

    def _hand_over(self, task: Task, token: SampledToken | None) -> None:
        """FILLING -> APPENDING (shared pool, same pool) or LEASED (two pools), and the Handoff goes out."""
        peer, key = task.end.peer, task.key
        ended = task.sequence.finish_reason is not None
        handoff = Handoff(
            request=task.message.request,
            first_token=token,
            sampler=SamplerState(task.sequence.sampling.seed, len(task.sequence.output_token_ids)),
            report=task.report,
            num_computed=task.num_computed,
            prompt_logprobs=task.logprobs,
        )
        if not task.owns_blocks:
            handoff.block_table = task.block_table
        elif self.shared is not None:
            if not ended:
                handoff.block_table = self.shared.hand_over(task.holder, peer, key)
        elif not ended:
            assert self.cache is not None
            handoff.num_blocks = -(-len(task.token_ids) // self.cache.block_size)
        del self.tasks[peer, key]
        task.end.send(handoff)
        if task.owns_blocks:
            assert self.cache is not None
            self.cache.release(task.holder)
        if ended:
            self._end_lease(peer, key, abandon=True)

    def _fail(self, task: Task, code: FailureCode, message: str) -> None:
        task.end.send(PrefillFailed(task.key, code, message))
        self._forget(task)
        self._end_lease(task.end.peer, task.key, abandon=True)

    def _drop_overdue(self) -> None:
        now = time.time()
        for task in [task for task in self.tasks.values() if task.message.request.deadline < now]:
            self._fail(task, "deadline", "deadline passed during prefill")

    def _forget(self, task: Task) -> None:
        """The one way a task ends without a Handoff. Idempotent."""
        if self.tasks.pop((task.end.peer, task.key), None) is None:
            return
        (self.running if task in self.running else self.waiting).remove(task)
        if task.owns_blocks:
            assert self.cache is not None
            self.cache.release(task.holder)

    def _lease_id(self, peer: str, key: TransferKey) -> str:
        return f"{peer}/{key[0]}/{key[1]}"

    def _end_lease(self, peer: str, key: TransferKey, abandon: bool) -> None:
        end = self.leases.get((peer, key))
        if end is None:
            return
        if abandon:
            end.abandon(key)
        self.ending_leases.add((peer, key))
        self._settle_leases()

    def _settle_leases(self) -> None:
        """LEASED -> CACHED/FREE, once the transfer no longer reads the blocks."""
        for peer, key in list(self.ending_leases):
            if not self.leases[peer, key].is_moving(key):
                assert self.cache is not None
                self.cache.end_lease(self._lease_id(peer, key))
                self.ending_leases.discard((peer, key))
                del self.leases[peer, key]
