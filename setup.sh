#!/bin/sh
# Builds the CUDA kernels for the GPUs of this machine, with the nvcc found in CUDA_HOME, PATH or /usr/local/cuda.
# Needs no network. Safe to run again: what is built already is kept.
#
#   sh setup.sh            for the GPUs that nvidia-smi reports
#   sh setup.sh sm_75      for an architecture named here; needs no GPU
#
#   BATON_CACHE      where the results go (~/.cache/baton)
#   PYTHON           interpreter to use (.venv/bin/python if there is one, else python3)
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

if [ -z "${PYTHON:-}" ]; then
    if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; else PYTHON=python3; fi
fi
if ! command -v "$PYTHON" >/dev/null 2>&1; then
    echo "setup: error: no Python interpreter '$PYTHON'; set PYTHON to one that has the dependencies" >&2
    exit 2
fi
case $PYTHON in
/*) ;;
*/*) PYTHON=$PWD/$PYTHON ;;
esac
case ${BATON_CACHE:-} in
'' | /*) ;;
*) export BATON_CACHE="$PWD/$BATON_CACHE" ;;
esac

cd "$root"
exec "$PYTHON" -m engine.kernels.cuda "$@"
