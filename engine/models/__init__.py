"""Decoder-only transformers over a paged KV pool."""
