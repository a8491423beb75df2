"""The decode engine: turns KV blocks into tokens in a continuously batched loop."""
