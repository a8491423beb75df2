"""Replays a coding-agent workload against any OpenAI-compatible server: `python3 -m bench.replay --help`."""
