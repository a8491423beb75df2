"""Settings that libraries read when they load must be made before they load, whatever a process imports first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
print(os.environ.get("MKL_CBWR"))
"""


@pytest.mark.parametrize("module", ["engine.runner", "prefill_worker.worker", "decode_worker.worker"])
def test_openmp_is_told_to_sleep_before_torch_loads_it_and_mkl_to_be_reproducible(module):
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "MKL_CBWR")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["PASSIVE", "AUTO,STRICT"]
