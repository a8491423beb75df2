"""The HTTP side: API, tokenization, routing, admission, supervision, metrics."""
