"""Prompt chunks on the GPU: several prompts packed into one batch of rows, small batches as recorded graphs.

A prompt of which most is cached leaves a hundred rows to compute, which takes the GPU less time than launching the
kernels one by one takes the host. So batches up to the largest bucket are padded to one and replayed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.decode_batch import PendingStep
from engine.device_sampler import DeviceSampler
from engine.kernels.attention_batch import AttentionBatch
from engine.kv_pool import KVPool
from engine.models.fused_transformer import FusedBatch, FusedTransformer
from engine.request import Sequence
from engine.step import Step

if TYPE_CHECKING:
    from engine.runner import SequenceChunk

BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class _Sizes:
    """Rows, sequences, attention tiles and blocks a sequence of one batch; of a bucket: the most it takes."""

    rows: int
    sequences: int
    tiles: int
    blocks: int

    @property
    def parts(self) -> list[int]:
        """Lengths of the pieces of the input buffer, in order."""
        per_sequence = [self.sequences] * 6
        return [self.rows] * 3 + per_sequence + [2 * self.tiles, self.sequences * self.blocks]


class _Inputs:
    """One int32 buffer and its pieces, on the device."""

    def __init__(self, sizes: _Sizes, device: torch.device, tile_rows: int):
        self.sizes = sizes
        self.buffer = torch.zeros(sum(sizes.parts), dtype=torch.int32, device=device)
        pieces = self.buffer.split(sizes.parts)
        token_ids, positions, blocks, slots, query_start, query_len, kv_len, last_rows, counts, tiles, tables = pieces
        attention = AttentionBatch(
            tables.view(sizes.sequences, sizes.blocks),
            slots,
            query_start,
            query_len,
            kv_len,
            tiles.view(sizes.tiles, 2),
            tile_rows,
        )
        self.batch = FusedBatch(token_ids, positions, blocks, attention, decode=False)
        self.slots, self.last_rows, self.counts = slots, last_rows, counts
        self.tokens = torch.zeros(sizes.sequences, dtype=torch.int32, device=device)
        self.logits: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None


class PrefillBatch:
    """max_sequences: most chunks in one batch; max_rows: most rows of a batch that is recorded; own_stream: chunks run
    beside the decode steps that are launched after them, not in turn with them."""

    def __init__(
        self,
        model: FusedTransformer,
        pool: KVPool,
        max_sequences: int,
        max_rows: int,
        max_model_len: int,
        own_stream: bool = False,
    ):
        self.model = model
        self.stream = torch.cuda.Stream() if own_stream else None
        self.pool = pool
        self.max_sequences = max_sequences
        self.max_blocks = -(-max_model_len // pool.layout.block_size) + 1
        self.tile_rows = model.kernels.tuning.prefill_tile
        self.device = pool.tensor.device
        self.sampler = DeviceSampler(model.config.vocab_size, max_sequences, self.device, use_triton=True)
        self.buckets = [size for size in BUCKETS if size <= max_rows]
        self.recorded: dict[int, _Inputs] = {}

    def record(self, progress: Callable[[str], None]) -> None:
        started = time.monotonic()
        self.sampler.warm_up(self.model.weights.embedding.dtype)
        memory = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number, size in enumerate(reversed(self.buckets)):
                progress(f"recording prefill graphs: {number + 1}/{len(self.buckets)}")
                tiles = -(-size // self.tile_rows) + self.max_sequences
                inputs = _Inputs(_Sizes(size, self.max_sequences, tiles, self.max_blocks), self.device, self.tile_rows)
                self._fill(inputs, [])
                self._compute(inputs, sample=True)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=stream):
                    self._compute(inputs, sample=True)
                inputs.graph = graph
                self.recorded[size] = inputs
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        progress(f"recorded {len(self.buckets)} prefill graphs in {time.monotonic() - started:.1f} s")

    def measure(self, num_rows: int) -> None:
        """Compute a batch of this many rows that writes no KV, to see what memory it takes."""
        sizes = _Sizes(num_rows, self.max_sequences, 1, 1)
        inputs = _Inputs(sizes, self.device, self.tile_rows)
        self._fill(inputs, [])
        self._compute(inputs, sample=True)

    def launch(self, chunks: "list[SequenceChunk]", sequences: list[Sequence]) -> Step:
        """Compute the chunks; sample the next token of those that want the last row's logits or all of them."""
        if self.stream is None:
            return self._launch(chunks, sequences)
        # Cached blocks may be those of decode steps still running, blocks to fill may have been theirs.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return self._launch(chunks, sequences)

    def settle(self) -> None:
        """What is launched from here on waits for the chunks: their blocks may be given to others."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _launch(self, chunks: "list[SequenceChunk]", sequences: list[Sequence]) -> Step:
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        sampled = [index for index, chunk in enumerate(chunks) if chunk.logits != "none"]
        wants_all = any(chunk.logits == "all" for chunk in chunks)
        size = next((size for size in self.buckets if size >= rows), None)
        inputs = None
        if size is not None and not wants_all and len(chunks) <= self.max_sequences:
            inputs = self.recorded.get(size)
        if inputs is None:
            tiles = sum(-(-len(chunk.token_ids) // self.tile_rows) for chunk in chunks)
            blocks = max(len(chunk.block_table) for chunk in chunks)
            inputs = _Inputs(_Sizes(rows, len(chunks), tiles, blocks), self.device, self.tile_rows)
        self._fill(inputs, chunks, sequences)
        for index in sampled:
            self.sampler.admit(index, sequences[index])
        all_logits: dict[int, torch.Tensor] = {}
        if inputs.graph is not None:
            inputs.graph.replay()
        elif wants_all:
            all_logits = self._compute_all(inputs, chunks)
        else:
            self._compute(inputs, sample=bool(sampled))
        return self._finish(inputs, sampled, sequences, all_logits)

    def _finish(
        self, inputs: _Inputs, sampled: list[int], sequences: list[Sequence], all_logits: dict[int, torch.Tensor]
    ) -> Step:
        rest = [index for index in sampled if not self.sampler.is_plain(sequences[index])]
        handle = None
        if rest:
            assert inputs.logits is not None
            counts = [len(sequences[index].output_token_ids) for index in rest]
            chosen = [sequences[index] for index in rest]
            handle = self.sampler.sample_rest(inputs.logits, rest, rest, counts, chosen, inputs.tokens)
        host = torch.empty(len(sequences), dtype=torch.int32, pin_memory=True)
        host.copy_(inputs.tokens[: len(sequences)], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return PendingStep(event, host, handle, rest if handle is not None else [], all_logits)

    def _compute(self, inputs: _Inputs, sample: bool) -> None:
        inputs.logits = self.model.logits(inputs.batch, self.pool.tensor, inputs.last_rows if sample else None)
        if inputs.logits is not None:
            self.sampler.sample_plain(inputs.logits, inputs.slots, inputs.counts, inputs.tokens)

    def _compute_all(self, inputs: _Inputs, chunks: "list[SequenceChunk]") -> dict[int, torch.Tensor]:
        rows = torch.arange(inputs.sizes.rows, dtype=torch.int32, device=self.device)
        logits = self.model.logits(inputs.batch, self.pool.tensor, rows)
        assert logits is not None
        inputs.logits = logits.index_select(0, inputs.last_rows)
        self.sampler.sample_plain(inputs.logits, inputs.slots, inputs.counts, inputs.tokens)
        parts = logits.split([len(chunk.token_ids) for chunk in chunks])
        return {index: part for index, part in enumerate(parts) if chunks[index].logits == "all"}

    def _fill(self, inputs: _Inputs, chunks: "list[SequenceChunk]", sequences: list[Sequence] | None = None) -> None:
        """Write a batch into the buffer: padding rows write no KV, padding sequences have no rows."""
        sizes = inputs.sizes
        host = torch.zeros(len(inputs.buffer), dtype=torch.int32).pin_memory()
        pieces = np.split(host.numpy(), np.cumsum(sizes.parts)[:-1])
        token_ids, positions, blocks, slots, query_start, query_len, kv_len, last_rows, counts, tiles, tables = pieces
        blocks[:] = -1
        tiles[:] = -1
        slots[:] = np.arange(sizes.sequences)
        block_size = self.pool.layout.block_size
        row = tile = 0
        for index, chunk in enumerate(chunks):
            count = len(chunk.token_ids)
            end = row + count
            at = np.arange(chunk.start, chunk.start + count)
            table = np.asarray(chunk.block_table, dtype=np.int32)
            token_ids[row:end] = chunk.token_ids
            positions[row:end] = at
            blocks[row:end] = table[at // block_size]
            query_start[index], query_len[index], kv_len[index] = row, count, chunk.start + count
            last_rows[index] = end - 1
            if sequences is not None:
                counts[index] = len(sequences[index].output_token_ids)
            tables[index * sizes.blocks : index * sizes.blocks + len(table)] = table[: sizes.blocks]
            firsts = range(0, count, self.tile_rows)
            tiles[2 * tile : 2 * (tile + len(firsts))] = [value for first in firsts for value in (index, first)]
            row, tile = end, tile + len(firsts)
        inputs.buffer.copy_(host, non_blocking=True)
