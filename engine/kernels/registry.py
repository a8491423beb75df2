"""Which implementation of each operation serves on this device.

    TABLE          the implementations, fastest first, down to plain torch
    choose         the first of each that suits the device and passes its self-check there
    Kernels        the chosen ones behind the calls that the model makes

Choices are made once, at start (engine/kernels/self_check.py, engine/tune.py).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from engine.config import ConfigError
from engine.kernels.attention_batch import AttentionBatch, Groups
from engine.kernels.linear import Linear
from engine.kernels.quantized_linear import QuantizedLinear
from engine.kernels.quantized_products import QuantizedProducts

Function = Callable[..., Any]

GEMV_ROWS = {"cuda": (1,), "triton": (1, 2, 4)}
MOST_PARTS = 16
GROUP_PARTS = 4
PROGRAMS_WANTED = 256
"""Programs of a decode attention launch that keep a GPU busy."""


@dataclass(frozen=True)
class Shape:
    """What implementations ask of a model and its pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Implementation:
    """`where` is "module:function"; `suits(shape, capability)` tells whether it can serve at all."""

    backend: str
    where: str
    suits: Callable[[Shape, tuple[int, int]], bool] = lambda shape, capability: True

    def load(self) -> Function:
        module, _, name = self.where.partition(":")
        return getattr(importlib.import_module(module), name)


def _half(shape: Shape) -> bool:
    return shape.dtype in (torch.float16, torch.bfloat16)


def _paged_blocks(shape: Shape) -> bool:
    """`tl.dot` needs 16 keys and dimensions, and a tile of keys must not leave its block."""
    size = shape.block_size
    return size >= 16 and (size & (size - 1) == 0 or size % 64 == 0) and shape.head_dim <= 256


def _dot(shape: Shape, capability: tuple[int, int]) -> bool:
    return capability >= (8, 0) and _paged_blocks(shape)


def _turing(shape: Shape, capability: tuple[int, int]) -> bool:
    if capability < (7, 5) or shape.dtype != torch.float16:
        return False
    from engine.kernels.cuda.attention import supports

    return supports(shape.head_dim, shape.block_size, shape.dtype, shape.group)


def _cuda_gemv(shape: Shape, capability: tuple[int, int]) -> bool:
    from engine.kernels.cuda.gemv import supports

    widths = (shape.num_heads * shape.head_dim, shape.intermediate_size)
    fits = supports(shape.hidden_size, shape.dtype, norm=True) and all(supports(k, shape.dtype) for k in widths)
    return fits and capability >= (7, 5)


TRITON = "engine.kernels.triton"
CUDA = "engine.kernels.cuda"
REFERENCE = "engine.kernels"
TABLE: dict[str, list[Implementation]] = {
    "add_rms_norm": [
        Implementation("triton", f"{TRITON}.rms_norm:add_rms_norm"),
        Implementation("torch", f"{REFERENCE}.rms_norm:add_rms_norm"),
    ],
    "swiglu": [
        Implementation("triton", f"{TRITON}.swiglu:swiglu"),
        Implementation("torch", f"{REFERENCE}.swiglu:swiglu"),
    ],
    "rope_kv_write": [
        Implementation("triton", f"{TRITON}.rope_kv_write:rope_kv_write"),
        Implementation("torch", f"{REFERENCE}.rope_kv_write:rope_kv_write"),
    ],
    "prefill_attention": [
        Implementation("triton", f"{TRITON}.prefill_attention:paged_prefill_attention", _dot),
        Implementation("cuda", f"{CUDA}.attention:paged_prefill_attention", _turing),
        Implementation("torch", f"{REFERENCE}.dense_attention:dense_prefill_attention"),
    ],
    "decode_attention": [
        Implementation("triton", f"{TRITON}.decode_attention:paged_decode_attention", _dot),
        Implementation("cuda", f"{CUDA}.attention:paged_decode_attention", _turing),
        Implementation("torch", f"{REFERENCE}.dense_attention:dense_decode_attention"),
    ],
    "shared_prefix_attention": [
        Implementation("triton", f"{TRITON}.shared_prefix:shared_prefix_attention", _dot),
    ],
    "gemv": [
        Implementation("cuda", f"{CUDA}.gemv:gemv", _cuda_gemv),
        Implementation("triton", f"{TRITON}.gemv:gemv", lambda shape, capability: _half(shape)),
    ],
    "matmul": [
        Implementation("triton", f"{TRITON}.matmul:matmul", lambda shape, capability: capability >= (8, 0)),
    ],
}
OPTIONAL = ("shared_prefix_attention", "gemv", "matmul")
"""Operations that the model does without when nothing implements them."""


@dataclass
class Tuning:
    """Timings' outcome for one model shape on one device (engine/tune.py). Sizes are "N x K" of a weight.

    linear  size -> [(most rows it is for, tiling of engine/kernels/triton/matmul.py), ...], cuBLAS beyond and between
    """

    prefill_tile: int = 64
    linear: dict[str, list[tuple[int, tuple[int, ...] | None]]] = field(default_factory=dict)


def size_of(weight: torch.Tensor) -> str:
    return f"{weight.shape[0]}x{weight.shape[1]}"


class Kernels:
    """The chosen implementations. `chosen` maps an operation to its backend and function.

    deterministic  results that do not depend on what else is in the batch, nor on how a prompt was cut: one tiling for
                   every product, one order of keys for every attention
    """

    def __init__(
        self,
        chosen: dict[str, tuple[str, Function]],
        tuning: Tuning,
        num_kv_heads: int,
        *,
        pdl: bool = False,
        deterministic: bool = False,
        quantized: QuantizedProducts | None = None,
    ):
        self.chosen = chosen
        self.quantized = quantized
        self.tuning = tuning
        self.num_kv_heads = num_kv_heads
        self.deterministic = deterministic
        self.pdl = {"pdl": True} if pdl else {}
        self._tilings: dict[str, list[tuple[int, Any]]] = {}
        if deterministic and not ("matmul" in chosen and chosen["prefill_attention"][0] == "triton"):
            raise ConfigError("deterministic: true needs kernels that this GPU does not run (SM80 or newer)")
        if "matmul" in chosen:
            from engine.kernels.triton.matmul import UNIFORM, Tiling

            self._uniform = UNIFORM
            for size, choices in tuning.linear.items():
                self._tilings[size] = [(rows, Tiling(*tiling) if tiling else None) for rows, tiling in choices]

    @property
    def can_be_recorded(self) -> bool:
        """Whether every step can be a CUDA graph. Plain torch attention reads lengths on the host."""
        return all(self.chosen[name][0] != "torch" for name in ("prefill_attention", "decode_attention"))

    @property
    def can_share_prefixes(self) -> bool:
        return (
            not self.deterministic
            and "shared_prefix_attention" in self.chosen
            and self.chosen["decode_attention"][0] == "triton"
        )

    def backends(self) -> dict[str, str]:
        return {name: backend for name, (backend, _) in self.chosen.items()}

    def fuses_rows(self, num_rows: int) -> bool:
        """Whether a decode batch of this size goes through gemv."""
        if self.deterministic:
            return False
        plain = "gemv" in self.chosen and num_rows in GEMV_ROWS[self.chosen["gemv"][0]]
        if self.quantized is None:
            return plain
        return self.quantized.fuses_rows(num_rows) and (plain or not self.quantized.beside_plain)

    def add_rms_norm(self, residual, delta, weight, eps):
        return self._call("add_rms_norm", residual, delta, weight, eps, **self.pdl)

    def swiglu(self, gate_up):
        return self._call("swiglu", gate_up, **self.pdl)

    def rope_kv_write(self, *arguments):
        return self._call("rope_kv_write", *arguments, **self.pdl)

    def prefill_attention(self, query, pool, layer, batch: AttentionBatch, window: int | None):
        return self._call("prefill_attention", query, pool, layer, batch, window, uniform=self.deterministic)

    def decode_attention(
        self, query, pool, layer, batch: AttentionBatch, window: int | None, groups: Groups | None = None
    ):
        if self.deterministic:
            return self.prefill_attention(query, pool, layer, batch, window)
        num_parts = decode_parts(len(query), self.num_kv_heads)
        shared = None
        if groups is not None and window is None:
            own_parts = num_parts = max(1, num_parts // 2)
            shared = self._call("shared_prefix_attention", query, pool, layer, batch, groups, GROUP_PARTS, own_parts)
        return self._call("decode_attention", query, pool, layer, batch, window, num_parts, shared, **self.pdl)

    def linear(self, x: torch.Tensor, layer: Linear | QuantizedLinear) -> torch.Tensor:
        """x `[T, K]` -> `[T, N]`."""
        if isinstance(layer, QuantizedLinear):
            assert self.quantized is not None
            return self.quantized.linear(x, layer)
        tiling = self._tiling(len(x), layer)
        if tiling is not None and tiling.parts == 1:
            return self._call("matmul", x, layer.weight, layer.bias, tiling)
        return F.linear(x, layer.weight, layer.bias)

    def linear_parts(self, x: torch.Tensor, layer: Linear | QuantizedLinear) -> torch.Tensor:
        """The same, or float32 `[parts, T, N]` whose sum it is, for add_rms_norm."""
        if isinstance(layer, QuantizedLinear):
            assert self.quantized is not None
            return self.quantized.linear(x, layer, may_split=True)
        tiling = self._tiling(len(x), layer)
        if tiling is not None and tiling.parts > 1 and layer.bias is None:
            return self._call("matmul", x, layer.weight, None, tiling)
        return self.linear(x, layer)

    def gemv(self, x: torch.Tensor, layer: Linear | QuantizedLinear, **fused) -> torch.Tensor:
        """x `[M, K]` with M in GEMV_ROWS; `fused` are the keywords of the kernels."""
        if isinstance(layer, QuantizedLinear):
            assert self.quantized is not None
            return self.quantized.gemv(x, layer, **fused, **self.pdl)
        return self._call("gemv", x, layer.weight, layer.bias, **fused, **self.pdl)

    def _tiling(self, num_rows: int, layer: Linear):
        if self.deterministic:
            return self._uniform
        for most_rows, tiling in self._tilings.get(size_of(layer.weight), ()):
            if num_rows <= most_rows:
                return tiling
        return None

    def _call(self, operation: str, *arguments, **options):
        return self.chosen[operation][1](*arguments, **options)


def decode_parts(batch_size: int, num_kv_heads: int) -> int:
    """Programs that share a sequence's keys: a power of two, one when the batch keeps the device busy by itself."""
    wanted = max(1, PROGRAMS_WANTED // (batch_size * num_kv_heads))
    return min(MOST_PARTS, 1 << (wanted.bit_length() - 1))
