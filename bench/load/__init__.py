"""Latency and throughput of an OpenAI-compatible server in a few fixed scenarios."""
