#!/bin/sh
# Starts the server in the foreground on 127.0.0.1:$PORT.
#
#   MODEL_DIR        Hugging Face model directory (required)
#   PORT             port of the HTTP API (8000)
#   CONFIG           a name in configs/ or the path of a YAML file (auto)
#   DRAFTER_BYO_DIR  directory of a drafter for speculative decoding (this build ignores it and says so)
#   PYTHON           interpreter to use (.venv/bin/python if there is one, else python3)
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

absolute() {
    case $1 in
    '' | /*) printf '%s' "$1" ;;
    *) printf '%s' "$PWD/$1" ;;
    esac
}

MODEL_DIR=$(absolute "${MODEL_DIR:-}")
DRAFTER_BYO_DIR=$(absolute "${DRAFTER_BYO_DIR:-}")
PORT=${PORT:-8000}
CONFIG=${CONFIG:-auto}
if [ -f "$CONFIG" ]; then CONFIG=$(absolute "$CONFIG"); fi

if [ -z "${PYTHON:-}" ]; then
    if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; else PYTHON=python3; fi
fi
if ! command -v "$PYTHON" >/dev/null 2>&1; then
    echo "baton: error: no Python interpreter '$PYTHON'; set PYTHON to one that has the dependencies" >&2
    exit 2
fi
case $PYTHON in */*) PYTHON=$(absolute "$PYTHON") ;; esac

export MODEL_DIR PORT CONFIG DRAFTER_BYO_DIR
cd "$root"
exec "$PYTHON" -m router "$@"
