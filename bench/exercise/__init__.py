"""The CPU exercise: optimization against a deterministic queueing model. `python3 -m bench.exercise.run --help`."""
