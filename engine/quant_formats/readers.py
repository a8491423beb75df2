"""Where quantized linear layers come from. Each reader answers for one stacked layer, or None when that one is plain.

StoredReader     a directory that engine.quantize wrote: the layout as it is
PublishedReader  an AWQ, GPTQ or compressed-tensors checkpoint, converted
RoundingReader   a plain checkpoint, rounded to nearest on the way in
CachingReader    any of the last two, its results kept on disk
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.kernels.quantized_linear import QuantizedLinear, Scheme, can_stack, stack
from engine.models.config import ModelError
from engine.quant_formats.published import PublishedFormat
from engine.quant_formats.unpack import LayoutError, is_quantized, unpack_layer
from engine.quantize.rounding import round_weight

log = logging.getLogger("weights")

LAYOUT_VERSION = 1
"""Changes with the layout of engine/kernels/quantized_linear.py and the rounding; the cache starts anew."""


class Tensors(Protocol):
    """A checkpoint's tensors by name."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> torch.Tensor: ...


class Reader(Protocol):
    def read(self, name: str, parts: dict[str, int], in_features: int) -> QuantizedLinear | None:
        """The layer `name`, without bias, on the reader's device. parts: names and output sizes of the checkpoint's
        layers that it stacks. Raises ModelError."""


class StoredReader:
    """`schemes` is the scheme of each stored layer, from config.json."""

    def __init__(self, tensors: Tensors, schemes: dict[str, Scheme], device: torch.device):
        self.tensors = tensors
        self.schemes = schemes
        self.device = device

    def read(self, name: str, parts: dict[str, int], in_features: int) -> QuantizedLinear | None:
        scheme = self.schemes.get(name)
        if scheme is None:
            return None
        found = {
            kind: self.tensors.get(f"{name}.{kind}")
            for kind in ("codes", "scales", "zeros", "permutation")
            if kind in ("codes", "scales") or self.tensors.has(f"{name}.{kind}")
        }
        return assemble(scheme, in_features, found).to(self.device)


def assemble(scheme: Scheme, in_features: int, tensors: dict[str, torch.Tensor]) -> QuantizedLinear:
    """A layer from its stored tensors."""
    group_size = 0
    if scheme != "w8a8":
        group_size = tensors["codes"].shape[1] * 32 // (4 if scheme == "w4a16" else 8) // tensors["scales"].shape[1]
    codes, scales = tensors["codes"], tensors["scales"]
    zeros, permutation = tensors.get("zeros"), tensors.get("permutation")
    return QuantizedLinear(scheme, in_features, codes, scales, zeros, group_size, permutation)


class PublishedReader:
    def __init__(self, tensors: Tensors, form: PublishedFormat, source: Path, device: torch.device):
        self.tensors = tensors
        self.form = form
        self.source = source
        self.device = device

    def read(self, name: str, parts: dict[str, int], in_features: int) -> QuantizedLinear | None:
        quantized = [self._is_quantized(part) for part in parts]
        if not any(quantized):
            return None
        if not all(quantized):
            plain = list(parts)[quantized.index(False)]
            raise ModelError(
                f"{self.source}: {plain} is not quantized but the projections beside it are: not supported"
            )
        layers = [self._part(part, size, in_features) for part, size in parts.items()]
        if not can_stack(layers):
            raise ModelError(
                f"{self.source}: {', '.join(parts)} have different orders of inputs (g_idx): not supported"
            )
        return stack(layers)

    def _is_quantized(self, part: str) -> bool:
        return is_quantized(lambda last: self.tensors.has(f"{part}.{last}"))

    def _part(self, part: str, num_outputs: int, num_inputs: int) -> QuantizedLinear:
        def get(last: str) -> torch.Tensor | None:
            name = f"{part}.{last}"
            return self.tensors.get(name).to(self.device) if self.tensors.has(name) else None

        try:
            return unpack_layer(get, self.form, num_outputs, num_inputs)
        except LayoutError as error:
            raise ModelError(f"{self.source}: {part}: {error}") from None


class RoundingReader:
    """scheme_of: the scheme of a layer by name, None to keep it plain. read_plain: its weight, stacked."""

    def __init__(
        self,
        scheme_of: Callable[[str], Scheme | None],
        read_plain: Callable[[dict[str, int], int], torch.Tensor],
    ):
        self.scheme_of = scheme_of
        self.read_plain = read_plain

    def read(self, name: str, parts: dict[str, int], in_features: int) -> QuantizedLinear | None:
        scheme = self.scheme_of(name)
        return None if scheme is None else round_weight(self.read_plain(parts, in_features), scheme)


class CachingReader:
    """One file a layer, in a directory named after everything that its content follows from."""

    def __init__(self, inner: Reader, directory: Path, device: torch.device):
        self.inner = inner
        self.directory = directory
        self.device = device
        self.writes = True
        self.num_converted = 0
        self._reported = time.monotonic()

    def read(self, name: str, parts: dict[str, int], in_features: int) -> QuantizedLinear | None:
        path = self.directory / f"{name}.safetensors"
        if path.is_file():
            try:
                return self._load(path, in_features)
            except (OSError, SafetensorError, KeyError):
                log.info("%s is not readable and is made again", path)
        layer = self.inner.read(name, parts, in_features)
        if layer is not None:
            self._progress(name)
            self._store(path, layer)
        return layer

    def _load(self, path: Path, in_features: int) -> QuantizedLinear:
        with safe_open(str(path), framework="pt", device=str(self.device)) as file:
            scheme: Any = file.metadata()["scheme"]
            return assemble(scheme, in_features, {name: file.get_tensor(name) for name in file.keys()})

    def _store(self, path: Path, layer: QuantizedLinear) -> None:
        if not self.writes:
            return
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            save_file(layer.tensors(), str(temporary), metadata={"scheme": layer.scheme})
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self.writes = False
            log.info("%s cannot be written (%s): the next start converts again", self.directory, error)

    def _progress(self, name: str) -> None:
        self.num_converted += 1
        if time.monotonic() - self._reported > 2:
            log.info("converted %d layers, up to %s", self.num_converted, name)
            self._reported = time.monotonic()


def cache_key(model_dir: Path, files: list[Path], settings: object) -> str:
    """Changes with the model's files (names, sizes, times of change), the settings and the layout."""
    facts: list[object] = [LAYOUT_VERSION, str(model_dir.resolve()), settings]
    for path in (model_dir / "config.json", *files):
        status = path.stat()
        facts.append((path.name, status.st_size, status.st_mtime_ns))
    return hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()
