"""Sampling kernels: the choices of engine/sampling.py, made where the logits are.

`torch_draw.py` is the plain-torch reference for any device; `triton_plain.py` and `triton_filtered.py` are the fast
implementation. Both take the tables of `batch.py`. None of them uses a matrix product, so they run from SM75 up.
"""
