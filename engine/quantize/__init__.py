"""Quantization of a model: schemes, rounding, and with calibration text GPTQ, AWQ-style scaling and smoothing."""
