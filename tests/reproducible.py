"""Where equality of bits, not only of tokens, can be asked for."""

from pathlib import Path

import pytest
import torch


def has_reproducible_products() -> bool:
    """MKL promises the same bits for any number of rows on Intel processors with AVX2 or later (engine/kernels)."""
    cpuinfo = Path("/proc/cpuinfo")
    intel = cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()
    return intel and torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


reproducible_products = pytest.mark.skipif(
    not has_reproducible_products(), reason="needs MKL on an Intel processor with AVX2"
)
