"""CUDA C++ kernels for SM75 (Turing) and newer, built by nvcc where they run; see docs/kernels-sm75.md."""
