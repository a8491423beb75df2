"""The prefill engine: turns a prompt into KV blocks and a first token."""
