"""The experiment record: one JSON document for each run of one configuration. `python3 -m bench.record --help`."""
