"""GpuRunner: the model runner of a GPU. Fast kernels, recorded graphs, tokens that stay on the device.

Everything is launched on one stream, in the order the engine asks for it, so a block that has been given back can be
written by what is launched next. (With prefill.second_stream prompt chunks have another one; see PrefillBatch.)
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import DeploymentConfig
from engine.decode_batch import DecodeBatch
from engine.kernels.quantized_products import choose_products
from engine.kernels.registry import Kernels, Shape, Tuning
from engine.kernels.self_check import choose
from engine.kv_pool import KVPool
from engine.models.fused_transformer import FusedTransformer
from engine.prefill_batch import PrefillBatch
from engine.request import Sequence
from engine.runner import ModelRunner, SequenceChunk
from engine.step import DecodeRow, Step
from engine.tune import FIRST_START_BUDGET_S, load_or_tune

log = logging.getLogger("runner")


@dataclass(frozen=True)
class Limits:
    """Most sequences in the running batch (0: this runner only prefills), prompts in a prefill step, tokens in it."""

    max_running: int
    max_sequences: int
    chunk_tokens: int
    second_stream: bool = False


class GpuRunner(ModelRunner):
    """Made by `load`, then `set_up`, then `use_pool`."""

    def set_up(self, kernels: Kernels, limits: Limits, graphs: bool, share: bool) -> None:
        """kernels: as engine/kernels/self_check.py chose them; graphs: record steps of common sizes; share: read blocks
        that running sequences share once."""
        self.limits = limits
        self.graphs = graphs and kernels.can_be_recorded
        self.share = share and kernels.can_share_prefixes
        self.fused = FusedTransformer(self.config, self.model.weights, self._rope, kernels)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    @torch.inference_mode()
    def use_pool(self, pool: KVPool) -> None:
        """Build the batches over the pool and record their graphs."""
        self.pool = pool
        limits = self.limits
        self.prefill_batch = PrefillBatch(
            self.fused,
            pool,
            limits.max_sequences,
            limits.chunk_tokens,
            self.max_model_len,
            limits.second_stream,
        )
        self.decode_batch = None
        if limits.max_running:
            self.decode_batch = DecodeBatch(self.fused, pool, limits.max_running, self.max_model_len, self.share)
        if self.graphs:
            report = _rarely(log.info)
            self.prefill_batch.record(report)
            if self.decode_batch is not None:
                self.decode_batch.record(report)

    def drop_pool(self) -> None:
        """Recorded graphs hold the pool's addresses, so they go with it."""
        graphs, self.graphs = self.graphs, False
        self.use_pool(KVPool.allocate(self.layout, 1, self.device))
        self.graphs = graphs

    @torch.inference_mode()
    def prefill(self, chunks: list[SequenceChunk], sequences: list[Sequence]) -> Step:
        return self.prefill_batch.launch(chunks, sequences)

    @torch.inference_mode()
    def join(self, slot: int, sequence: Sequence, block_table: list[int]) -> None:
        assert self.decode_batch is not None
        self.decode_batch.join(slot, sequence, block_table)

    def leave(self, slot: int) -> None:
        assert self.decode_batch is not None
        self.decode_batch.leave(slot)

    @torch.inference_mode()
    def decode(self, rows: list[DecodeRow]) -> Step:
        assert self.decode_batch is not None
        return self.decode_batch.launch(rows)

    def settle(self) -> None:
        self.prefill_batch.settle()

    @torch.inference_mode()
    def activation_bytes(self) -> int:
        """Memory that the largest prefill step takes beside weights and pool, measured on a pool of one block."""
        scratch = KVPool.allocate(self.layout, 1, self.device)
        batch = PrefillBatch(self.fused, scratch, self.limits.max_sequences, 0, self.max_model_len)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        batch.measure(min(self.limits.chunk_tokens, self.max_model_len))
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
        del batch, scratch
        torch.cuda.empty_cache()
        return used


def load_gpu_runner(model_dir: str, config: DeploymentConfig, decodes: bool, options: dict[str, Any]) -> GpuRunner:
    """A runner with its kernels chosen, checked and tuned, lacking only a pool. `options` are those of `load`."""
    runner = GpuRunner.load(model_dir, **options)
    assert isinstance(runner, GpuRunner)
    shape = kernel_shape(runner)
    device = torch.device(runner.device)
    chosen = choose(shape, device)
    tuning = Tuning()
    if not config.deterministic:
        tuning = load_or_tune(shape, runner.model.weights, FIRST_START_BUDGET_S)
    kernels = Kernels(
        chosen,
        tuning,
        runner.config.num_kv_heads,
        pdl=torch.cuda.get_device_capability(device) >= (9, 0),
        deterministic=config.deterministic,
        quantized=choose_products(
            runner.model.weights.linears(),
            shape.dtype,
            torch.cuda.get_device_capability(device),
            config.deterministic,
        ),
    )
    log.info("kernels: %s", ", ".join(f"{name} {backend}" for name, backend in kernels.backends().items()))
    resolved = config.on(runner.device)
    limits = Limits(
        resolved.max_running if decodes else 0,
        config.prefill.max_sequences,
        resolved.chunk_tokens,
        decodes and config.prefill.second_stream,
    )
    runner.set_up(kernels, limits, config.decode.cuda_graphs, config.decode.shared_prefix)
    return runner


def kernel_shape(runner: ModelRunner) -> Shape:
    model, layout = runner.config, runner.layout
    return Shape(
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        layout.block_size,
        model.hidden_size,
        model.intermediate_size,
        layout.dtype,
    )


def _rarely(report: Callable[[str], None]) -> Callable[[str], None]:
    """Pass on what is over, and one line of progress every two seconds."""
    last = time.monotonic()

    def progress(text: str) -> None:
        nonlocal last
        if text.startswith("recorded") or time.monotonic() - last > 2:
            report(text)
            last = time.monotonic()

    return progress
