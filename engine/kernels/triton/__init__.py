"""Kernels in Triton. Imported only where there is a GPU (or its interpreter); engine/kernels/registry.py picks them.

Those that multiply matrices with `tl.dot` are for SM80 and newer: for SM75 Triton makes scalar code of it.
"""
