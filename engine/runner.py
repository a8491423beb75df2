"""ModelRunner: what both engines compute with, in plain torch. engine/gpu_runner.py does the same with fast kernels.

    prefill(chunks, sequences) -> Step     prompt chunks; the next token of those that are complete
    join(slot, ...), leave(slot)           a sequence enters or leaves the running batch
    decode(rows) -> Step                   one more token for each row; the last token is taken from the slot

A Step's tokens are waited for, so that an engine can launch the next one first. Here each is computed at once.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.kernels.paged_attention import AttentionPlan, Chunk
from engine.kv_pool import KVLayout, KVPool
from engine.models.config import ModelConfig, ModelError
from engine.models.rope import rope_table
from engine.models.transformer import Batch, Transformer
from engine.protocol import ModelInfo
from engine.quantize.scheme import Precision
from engine.request import Sequence
from engine.sampling import sample
from engine.step import DecodeRow, FinishedStep, Step
from engine.weights import WeightsOrigin, load_weights, weight_files

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class SequenceChunk:
    """Tokens of one sequence to compute now.

    token_ids    at positions start, start + 1, ...; at least one
    start        positions before it have their KV in the blocks already
    block_table  the sequence's blocks; must cover every position up to the chunk's last one
    logits       rows wanted: none, the last token's, or all
    """

    token_ids: list[int]
    start: int
    block_table: list[int]
    logits: Literal["none", "last", "all"] = "last"


class ModelRunner:
    """A loaded model. The worker gives it a pool (`use_pool`) before the first step and may give it another one."""

    def __init__(
        self,
        config: ModelConfig,
        model: Transformer,
        layout: KVLayout,
        max_model_len: int,
        fingerprint: str,
        device: str,
    ):
        self.config = config
        self.model = model
        self.layout = layout
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.device = device
        self.pool: KVPool | None = None
        self._slots: dict[int, Sequence] = {}
        self._rope = rope_table(config.rope, config.head_dim, max_model_len, torch.device(device))
        self._windows = set(config.sliding_windows)

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        weights: WeightsOrigin = "files",
        dtype: str = "auto",
        device: str = "cpu",
        block_size: int,
        max_model_len: int | None = None,
        precision: Precision = Precision(),
    ) -> "ModelRunner":
        """Read a Hugging Face directory. Raises ModelError with one line.

        weights        "random": the same shapes without weight files
        dtype          "auto": float32 on CPU, else the checkpoint's own
        max_model_len  default: the model's own limit, which it must not exceed
        precision      what the weights of an unquantized model are rounded to
        """
        config = ModelConfig.from_dir(model_dir)
        if max_model_len is not None and max_model_len > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ModelError(f"max_model_len {max_model_len} exceeds the model's max_position_embeddings, {limit}")
        torch_dtype = resolve_dtype(dtype, config, device)
        loaded = load_weights(config, model_dir, weights, torch_dtype, torch.device(device), precision)
        layout = KVLayout(config.num_layers, config.num_kv_heads, block_size, config.head_dim, torch_dtype)
        length = max_model_len or config.max_position_embeddings
        identity = fingerprint(model_dir, weights, precision)
        return cls(config, Transformer(config, loaded), layout, length, identity, device)

    def activation_bytes(self) -> int:
        """Memory that the largest step takes beside weights and pool, where that matters: not on CPU."""
        return 0

    def info(self, name: str) -> ModelInfo:
        """What a worker called `name` tells its peers about its model."""
        return ModelInfo(
            name=name,
            fingerprint=self.fingerprint,
            dtype=str(self.layout.dtype).removeprefix("torch."),
            block_size=self.layout.block_size,
            block_bytes=self.layout.block_bytes,
            layout=self.layout.describe(),
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=list(self.config.eos_token_ids),
        )

    def use_pool(self, pool: KVPool) -> None:
        """Work in this pool from now on. Nothing may be running."""
        self.pool = pool

    def drop_pool(self) -> None:
        """Let go of the pool, whose owner is gone; nothing is computed until `use_pool` gives another one."""
        self.pool = None

    def prefill(self, chunks: list[SequenceChunk], sequences: list[Sequence]) -> Step:
        """Compute the chunks, and sample a token after those that asked for logits."""
        logits = self.run(chunks)
        rows = torch.split(logits, [len(wanted_rows([chunk])) for chunk in chunks])
        asked = [index for index, chunk in enumerate(chunks) if chunk.logits != "none"]
        last = [rows[index][-1] for index in asked]
        tokens = sample(torch.stack(last), [sequences[index] for index in asked]) if asked else []
        sampled = dict(zip(asked, tokens))
        return FinishedStep(
            [sampled.get(index) for index in range(len(chunks))],
            {index: rows[index] for index in asked if chunks[index].logits == "all"},
        )

    def settle(self) -> None:
        """A prompt was given up while its chunk may be running: what is launched next must not overtake it."""

    def join(self, slot: int, sequence: Sequence, block_table: list[int]) -> None:
        """A prefilled sequence takes a slot of the running batch, with its last token."""
        ahead = Sequence(sequence.request)
        ahead.output_token_ids = list(sequence.output_token_ids)
        self._slots[slot] = ahead

    def leave(self, slot: int) -> None:
        """The slot is free for another sequence. Idempotent."""
        self._slots.pop(slot, None)

    def decode(self, rows: list[DecodeRow]) -> Step:
        """One token for each row, given the one its slot holds."""
        sequences = [self._slots[row.slot] for row in rows]
        chunks = [
            SequenceChunk([sequence.output_token_ids[-1]], row.position, row.block_table)
            for row, sequence in zip(rows, sequences)
        ]
        tokens = sample(self.run(chunks), sequences)
        for sequence, token in zip(sequences, tokens):
            sequence.output_token_ids.append(0 if token is None else token.token_id)
        return FinishedStep(tokens)

    @torch.inference_mode()
    def run(self, chunks: list[SequenceChunk]) -> torch.Tensor:
        """Compute the chunks and store their KV in the pool. Chunks of one call must not share a block they write.

        Returns logits float32 `[n_rows, vocab_size]`, rows in chunk order: one for "last", len(token_ids) for "all".
        """
        assert self.pool is not None, "the worker calls use_pool before the first run"
        assert self.pool.layout == self.layout, f"the pool holds {self.pool.layout.describe()}"
        hidden = self.model.forward(self._batch(chunks), self.pool.tensor)
        rows = wanted_rows(chunks)
        if len(rows) < len(hidden):
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        return self.model.logits(hidden)

    def _batch(self, chunks: list[SequenceChunk]) -> Batch:
        block_size = self.layout.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids, "a chunk needs at least one token"
            assert end <= self.max_model_len, f"position {end - 1} is beyond max_model_len {self.max_model_len}"
            assert end <= len(chunk.block_table) * block_size, f"block table is too short for {end} tokens"
            token_ids += chunk.token_ids
            positions += range(chunk.start, end)
            blocks += [chunk.block_table[position // block_size] for position in range(chunk.start, end)]
        device = torch.device(self.device)
        at = torch.tensor(positions, dtype=torch.int64, device=device)
        plan = AttentionPlan(
            [Chunk(chunk.start, len(chunk.token_ids), chunk.block_table) for chunk in chunks],
            self.layout,
            self._windows,
            device,
        )
        return Batch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            cos_sin=self._rope[at],
            blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
            offsets=at % block_size,
            attention=plan,
        )


def wanted_rows(chunks: list[SequenceChunk]) -> list[int]:
    """Rows of the packed batch whose logits the chunks ask for, in order."""
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        begin, end = end, end + len(chunk.token_ids)
        if chunk.logits != "none":
            rows += range(begin if chunk.logits == "all" else end - 1, end)
    return rows


def resolve_dtype(dtype: str, config: ModelConfig, device: str) -> torch.dtype:
    """The torch dtype that a configuration's `dtype` means on a device. Raises ModelError.

    "auto": float32 on CPU, else the checkpoint's own; but GPUs before SM80 compute in float16, having no bfloat16.
    """
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else config.dtype or "float16"
        if dtype == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
            dtype = "float16"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[dtype]


def fingerprint(model_dir: str | Path, weights: WeightsOrigin, precision: Precision = Precision()) -> str:
    """Hash of what makes two workers' KV interchangeable: config.json, the weight files' names and sizes, and what they
    are rounded to."""
    digest = hashlib.blake2b((Path(model_dir) / "config.json").read_bytes(), digest_size=16)
    if weights == "random":
        digest.update(b"random")
    else:
        for path in weight_files(model_dir):
            digest.update(f"\n{path.name} {path.stat().st_size}".encode())
    if not precision.is_full:
        digest.update(repr(precision).encode())
    return digest.hexdigest()
