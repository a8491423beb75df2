"""The running batch on the GPU: block tables and last tokens by slot, and one recorded graph for each batch size.

    host                                device
    rows -> one int32 buffer --copy-->  inputs
                                        advance    tables[slot, index] = block, token = last_token[slot], its KV's place
                                        the model, the head, the plain sampler       (one CUDA graph a bucket)
                                        sample_rest for rows that ask for more
                                        last_token[slot] = token                     the next step needs no host
    tokens <--copy, event-------------  tokens

Nothing waits for the device here; `PendingStep.wait` waits for the copy of one step's tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from engine.device_sampler import DeviceSampler, PendingLogprobs
from engine.kernels.attention_batch import AttentionBatch, Groups
from engine.kv_pool import KVPool
from engine.models.fused_transformer import FusedBatch, FusedTransformer
from engine.request import SampledToken, Sequence
from engine.shared_groups import SharedGroups
from engine.step import DecodeRow, Step

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
FIELDS = 5
"""Rows of the input buffer: slot, position, index in the block table to set (-1: none), its block, outputs so far."""


@triton.jit
def _advance(inputs, tables, last_token, token_ids, blocks, kv_len, num_rows, table_stride, block_size):
    row = tl.program_id(0)
    slot = tl.load(inputs + row).to(tl.int64)
    position = tl.load(inputs + num_rows + row)
    index = tl.load(inputs + 2 * num_rows + row)
    block = tl.load(inputs + 3 * num_rows + row)
    table = tables + slot * table_stride
    if index >= 0:
        tl.store(table + index, block)
    at = tl.maximum(position, 0) // block_size
    known = tl.load(table + at)
    tl.store(blocks + row, tl.where(position < 0, -1, tl.where(index == at, block, known)))
    tl.store(kv_len + row, position + 1)
    tl.store(token_ids + row, tl.maximum(tl.load(last_token + slot), 0))


@triton.jit
def _remember(inputs, tokens, last_token):
    row = tl.program_id(0)
    tl.store(last_token + tl.load(inputs + row).to(tl.int64), tl.load(tokens + row))


@dataclass
class PendingStep(Step):
    """A step on its way. `rest` fetches the log-probabilities of `rest_rows`."""

    event: torch.cuda.Event
    tokens: torch.Tensor
    rest: PendingLogprobs | None = None
    rest_rows: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def wait(self) -> list[SampledToken | None]:
        self.event.synchronize()
        sampled: list[SampledToken | None] = [
            SampledToken(token) if token >= 0 else None for token in self.tokens.tolist()
        ]
        if self.rest is not None:
            for row, logprobs in zip(self.rest_rows, self.rest.read(), strict=True):
                token = sampled[row]
                if token is not None:
                    token.logprobs = logprobs
        return sampled


@dataclass
class _Recorded:
    """Fixed tensors of one bucket. `inputs`: int32, FIELDS rows of `size`, then the groups'."""

    size: int
    inputs: torch.Tensor
    token_ids: torch.Tensor
    blocks: torch.Tensor
    kv_len: torch.Tensor
    tokens: torch.Tensor
    batch: FusedBatch
    logits: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None


class DecodeBatch:
    """max_running slots, and one more for rows that only fill up a bucket."""

    def __init__(self, model: FusedTransformer, pool: KVPool, max_running: int, max_model_len: int, share: bool):
        self.model = model
        self.pool = pool
        self.max_running = max_running
        self.device = pool.tensor.device
        self.max_blocks = -(-max_model_len // pool.layout.block_size) + 1
        self.sampler = DeviceSampler(model.config.vocab_size, max_running + 1, self.device, use_triton=True)
        self.tables = self._int32(max_running + 1, self.max_blocks)
        self.last_token = self._int32(max_running + 1)
        self.num_blocks = [0] * (max_running + 1)
        group = model.config.num_heads // model.config.num_kv_heads
        self.groups = SharedGroups(group, pool.layout.block_size) if share else None
        self.recorded: dict[tuple[int, bool], _Recorded] = {}
        self.num_grouped_steps = 0
        self.buckets = [*(size for size in BUCKETS if size < max_running), max_running]

    # slots

    def join(self, slot: int, sequence: Sequence, block_table: list[int]) -> None:
        """A sequence takes a slot, with its last token."""
        values = torch.tensor([sequence.output_token_ids[-1], *block_table], dtype=torch.int32).pin_memory()
        self.last_token[slot : slot + 1].copy_(values[:1], non_blocking=True)
        self.tables[slot, : len(block_table)].copy_(values[1:], non_blocking=True)
        self.num_blocks[slot] = len(block_table)
        self.sampler.admit(slot, sequence)
        if self.groups is not None:
            self.groups.join(slot, block_table)

    def leave(self, slot: int) -> None:
        self.sampler.release(slot)
        if self.groups is not None:
            self.groups.leave(slot)

    # recording

    def record(self, progress: Callable[[str], None]) -> None:
        """Record every bucket, largest first so that the smaller ones find their memory in its."""
        started = time.monotonic()
        self.sampler.warm_up(self.model.weights.embedding.dtype)
        memory = torch.cuda.graph_pool_handle()
        kinds = [False, True] if self.groups is not None else [False]
        todo = [(size, grouped) for size in reversed(self.buckets) for grouped in kinds if size > 1 or not grouped]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number, (size, grouped) in enumerate(todo):
                progress(f"recording decode graphs: {number + 1}/{len(todo)}")
                recorded = self._inputs(size, grouped)
                self._compute(recorded)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=stream):
                    self._compute(recorded)
                recorded.graph = graph
                self.recorded[size, grouped] = recorded
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        progress(f"recorded {len(todo)} decode graphs in {time.monotonic() - started:.1f} s")

    # a step

    def launch(self, rows: list[DecodeRow]) -> Step:
        size = next(size for size in self.buckets if size >= len(rows))
        plan = self.groups.plan([row.slot for row in rows]) if self.groups is not None and size > 1 else None
        grouped = plan is not None
        self.num_grouped_steps += grouped
        recorded = self.recorded.get((size, grouped)) or self._inputs(size, grouped)
        host = torch.empty(len(recorded.inputs), dtype=torch.int32, pin_memory=True)
        values = host.numpy()
        fields = values[: FIELDS * size].reshape(FIELDS, size)
        count = len(rows)
        fields[:, count:] = [[self.max_running], [-1], [-1], [0], [0]]
        fields[:, :count] = [
            [row.slot for row in rows],
            [row.position for row in rows],
            *zip(*[self._new_block(row) for row in rows]),
            [row.num_outputs for row in rows],
        ]
        if plan is not None:
            plan.write(values[FIELDS * size :], size)
        recorded.inputs.copy_(host, non_blocking=True)
        if recorded.graph is not None:
            recorded.graph.replay()
        else:
            self._compute(recorded)
        return self._finish(recorded, rows)

    def _new_block(self, row: DecodeRow) -> tuple[int, int]:
        """(index, block) that the device's copy of the block table lacks, (-1, 0) when it is complete."""
        known, length = self.num_blocks[row.slot], len(row.block_table)
        if known == length:
            return -1, 0
        self.num_blocks[row.slot] = length
        if length > known + 1:
            values = torch.tensor(row.block_table[known:], dtype=torch.int32).pin_memory()
            self.tables[row.slot, known:length].copy_(values, non_blocking=True)
        return length - 1, row.block_table[-1]

    def _finish(self, recorded: _Recorded, rows: list[DecodeRow]) -> Step:
        rest = [index for index, row in enumerate(rows) if not self.sampler.is_plain(row.sequence)]
        handle = None
        if rest:
            chosen = [rows[index] for index in rest]
            assert recorded.logits is not None
            handle = self.sampler.sample_rest(
                recorded.logits,
                rest,
                [row.slot for row in chosen],
                [row.num_outputs for row in chosen],
                [row.sequence for row in chosen],
                recorded.tokens,
            )
            _remember[(recorded.size,)](recorded.inputs, recorded.tokens, self.last_token)
        host = torch.empty(len(rows), dtype=torch.int32, pin_memory=True)
        host.copy_(recorded.tokens[: len(rows)], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return PendingStep(event, host, handle, rest if handle is not None else [])

    def _compute(self, recorded: _Recorded) -> None:
        size, model = recorded.size, self.model
        _advance[(size,)](
            recorded.inputs,
            self.tables,
            self.last_token,
            recorded.token_ids,
            recorded.blocks,
            recorded.kv_len,
            size,
            self.tables.stride(0),
            self.pool.layout.block_size,
        )
        recorded.logits = logits = model.logits(recorded.batch, self.pool.tensor, None)
        assert logits is not None
        slots, counts = recorded.inputs[:size], recorded.inputs[4 * size : 5 * size]
        self.sampler.sample_plain(logits, slots, counts, recorded.tokens)
        _remember[(size,)](recorded.inputs, recorded.tokens, self.last_token)

    def _inputs(self, size: int, grouped: bool) -> _Recorded:
        num_tiles = SharedGroups.most_tiles(size)
        total = FIELDS * size + (2 * size + 3 * num_tiles if grouped else 0)
        inputs = self._int32(total)
        inputs[:size] = self.max_running
        inputs[size : 3 * size] = -1
        token_ids, blocks, kv_len, tokens = (self._int32(size) for _ in range(4))
        groups = None
        if grouped:
            members, lens, tiles = inputs[FIELDS * size :].split([size, size, 3 * num_tiles])
            groups = Groups(members, tiles.view(num_tiles, 3), lens)
        rows = torch.arange(size, dtype=torch.int32, device=self.device)
        tiles = torch.stack((rows, torch.zeros_like(rows)), dim=1)  # one a row: deterministic decoding uses them
        attention = AttentionBatch(self.tables, inputs[:size], rows, torch.ones_like(rows), kv_len, tiles, 16)
        batch = FusedBatch(token_ids, inputs[size : 2 * size], blocks, attention, True, groups)
        return _Recorded(size, inputs, token_ids, blocks, kv_len, tokens, batch)

    def _int32(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)
