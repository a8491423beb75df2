"""`python3 -m router`: the server. start_server.sh calls it with everything in the environment."""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

try:
    from engine.config import CONFIG_DIR, ConfigError, load_config
    from engine.wire import WireError, parse_address
    from kv_transfer.choose import resolve_channel
    from router.announce import ServerOptions
    from router.server import ServerError, log, serve
    from router.supervisor import WorkerFailed
except ModuleNotFoundError as error:
    sys.exit(f"baton: error: {sys.executable} lacks package {error.name!r}; install it, or set PYTHON to another one")

DESCRIPTION = """\
Serves a language model over an OpenAI-compatible HTTP API on 127.0.0.1. It starts the prefill and decode workers that
the configuration asks for, restarts one that dies, and shares requests out among them. Workers may also be started
elsewhere:

  python3 -m decode_worker --name d9 --router HOST:PORT --config FILE --model-dir DIR

where HOST:PORT is this server's --control address. Any number may join or leave while it runs.
"""

EPILOG = """\
SIGTERM or Ctrl-C: new requests get a 503, running ones end (at most router.drain_timeout_s), then everything stops.
A second one stops at once. Exit codes: 0 stopped as asked, 1 cannot start or go on, 2 bad arguments or configuration.

examples:
  MODEL_DIR=models/smollm2 PORT=8000 sh start_server.sh
  python3 -m router --model-dir models/smollm2 --config disagg-cpu-tcp
  python3 -m router --model-dir models/smollm2 --config my.yaml --control 10.0.0.5:7000 --no-workers
"""


def parse_options(arguments: list[str] | None = None) -> ServerOptions:
    """Options from the command line, then the environment. Exits with one line and code 2 when they cannot be used."""
    names = ", ".join(sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")))
    parser = argparse.ArgumentParser(
        prog="python3 -m router",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env = os.environ
    parser.add_argument(
        "--model-dir",
        metavar="DIR",
        default=env.get("MODEL_DIR"),
        help="Hugging Face model directory (default: $MODEL_DIR)",
    )
    parser.add_argument(
        "--port", default=env.get("PORT") or "8000", help="port of the HTTP API (default: $PORT, else 8000)"
    )
    parser.add_argument(
        "--config",
        metavar="NAME|FILE",
        default=env.get("CONFIG") or "auto",
        help=f"YAML file, or one of {names} (default: $CONFIG, else auto)",
    )
    parser.add_argument(
        "--control",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="where workers register; give an address that other hosts reach to let workers there join (default: a "
        "free port of 127.0.0.1). There is no authentication: keep it on a private network",
    )
    parser.add_argument("--no-workers", action="store_true", help="start no workers; wait for those started elsewhere")
    given = parser.parse_args(arguments)
    try:
        config = resolve_channel(load_config(given.config))
        control = parse_address(given.control)
    except (ConfigError, WireError) as error:
        raise SystemExit(_fail(str(error))) from None
    if not given.port.isdecimal() or not 0 < int(given.port) < 65536:
        raise SystemExit(_fail(f"PORT {given.port!r} is not a port; give a number from 1 to 65535"))
    file = Path(given.config)
    return ServerOptions(
        config=config,
        config_file=str(file.resolve()) if file.is_file() else given.config,
        model_dir=_model_dir(given.model_dir or config.model.dir),
        port=int(given.port),
        control=control,
        starts_workers=not given.no_workers,
        drafter_dir=env.get("DRAFTER_BYO_DIR", ""),
    )


def _model_dir(given: str | None) -> Path:
    if not given:
        raise SystemExit(_fail("no model: set MODEL_DIR to a Hugging Face model directory (or give --model-dir)"))
    path = Path(given).resolve()
    if not path.is_dir():
        raise SystemExit(_fail(f"MODEL_DIR {given!r} is not a directory"))
    if not (path / "config.json").is_file():
        raise SystemExit(_fail(f"MODEL_DIR {given!r} has no config.json; give a Hugging Face model directory"))
    return path


def _fail(message: str, code: int = 2) -> int:
    log(f"error: {message}")
    return code


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="baton: %(message)s", stream=sys.stderr)
    options = parse_options()
    try:
        return asyncio.run(serve(options))
    except (ServerError, WireError, WorkerFailed) as error:
        return _fail(str(error), code=1)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
