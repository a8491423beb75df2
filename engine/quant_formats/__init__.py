"""Quantized checkpoints: what is read, and how it becomes the layout of engine/kernels/quantized_linear.py."""
