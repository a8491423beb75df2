"""What both engines share: models, kernels, the KV pool and its prefix index, sampling, messages."""
