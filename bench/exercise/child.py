"""Runs a submission in a process of its own, so that nothing it does can reach the driver's model or its log.

Only JSON crosses between the two:

    child -> driver    {"evaluate": config} | {"done": [config, log], "explanation": [...]} | {"failed": text}
    driver -> child    {"metrics": {...}} | {"refused": why}
"""

import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class SubmissionError(Exception):
    """The submission did not come to an end; the message says how."""


class Refused(Exception):
    """Raised inside a submission by an evaluation that the driver refused."""


def call_submission(
    path: Path, baseline: dict[str, Any], evaluate: Callable[[Any], dict[str, Any]], timeout_s: float
) -> dict[str, Any]:
    """The {"done": ..., "explanation": ...} of `optimize(baseline, evaluate)` in the file at `path`.

    `evaluate` runs in this process; an Exception of it is raised in the submission as Refused. Raises SubmissionError
    when the submission raises, ends its process, runs longer than `timeout_s` or answers with what is no JSON.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_submission, args=(str(path), json.dumps(baseline), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return serve(ours, evaluate, time.monotonic() + timeout_s, timeout_s)
    finally:
        ours.close()
        process.kill()
        process.join()


def serve(
    connection: Connection, evaluate: Callable[[Any], dict[str, Any]], deadline: float, timeout_s: float
) -> dict[str, Any]:
    while True:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise SubmissionError(f"optimize did not end within {timeout_s:g} s")
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise SubmissionError("the submission ended its process before optimize returned") from None
        if "failed" in message:
            raise SubmissionError(message["failed"])
        if "done" in message:
            return message
        try:
            answer: dict[str, Any] = {"metrics": evaluate(message["evaluate"])}
        except Exception as error:
            answer = {"refused": str(error)}
        connection.send_bytes(json.dumps(answer).encode())


def run_submission(path: str, baseline: str, connection: Connection) -> None:
    """The child's side: import the file, call optimize, send what it returned."""
    try:
        module = load(path)

        def evaluate(config: dict[str, Any]) -> dict[str, Any]:
            connection.send_bytes(json.dumps({"evaluate": config}).encode())
            answer = json.loads(connection.recv_bytes())
            if "refused" in answer:
                raise Refused(answer["refused"])
            return answer["metrics"]

        best_config, experiment_log = module.optimize(json.loads(baseline), evaluate)
        explain = getattr(module, "explain", None)
        lines = [str(line) for line in explain(experiment_log)] if explain else []
        message = {"done": [best_config, experiment_log], "explanation": lines}
        data = json.dumps(message).encode()
    except BaseException as error:  # SystemExit too: leaving early is no success
        data = json.dumps({"failed": f"optimize raised {type(error).__name__}: {error}"}).encode()
    connection.send_bytes(data)
    connection.close()


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("submission", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
