"""Writes a damaged copy of a model, to show that the gate notices: noise on every projection."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_damaged(source: Path, target: Path, noise: float, seed: int = 0) -> None:
    """Copy `source` to the new directory `target`, adding to each matrix of its layers Gaussian noise of `noise` times
    the matrix' own standard deviation. Raises FileExistsError."""
    generator = torch.Generator().manual_seed(seed)
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors":
            if path.is_file():
                shutil.copy(path, target / path.name)
            continue
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and ".layers." in name:
                spread = tensor.float().std() * noise
                tensors[name] = (tensor.float() + torch.randn(tensor.shape, generator=generator) * spread).to(
                    tensor.dtype
                )
        save_file(tensors, target / path.name, metadata={"format": "pt"})
