"""What both engines share: models, kernels, the KV pool and its prefix index, sampling, messages.

OpenMP's threads spin while they wait, unless told otherwise before torch loads it. Engines and router share the cores
of a machine, and there a spinning thread keeps the one it waits for from running: prefill with two threads on two busy
cores takes ten times as long.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
