"""What both processes of a measurement agree on."""

import json
from dataclasses import asdict, dataclass

import torch

from engine.kv_pool import KVLayout


@dataclass(frozen=True)
class Setting:
    """num_layers  of a block of Qwen3-4B's shape otherwise: 8 KV heads of 128, 64 tokens, 16 bits
    gap_ms         between two parts of a transfer, as long as a chunk's computation would take
    scattered      blocks lie anywhere in both pools, as they do after hours of use; else in one stretch"""

    channel: str
    device: str
    num_blocks: int
    num_layers: int
    gap_ms: float
    scattered: bool

    @classmethod
    def load(cls, text: str) -> "Setting":
        return cls(**json.loads(text))

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.num_layers, num_kv_heads=8, block_size=64, head_dim=128, dtype=torch.float16)

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
