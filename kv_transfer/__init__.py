"""How KV blocks get from a prefill engine to a decode engine: channels, the Handoff message, leases."""
