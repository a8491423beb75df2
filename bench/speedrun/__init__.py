"""Baseline and candidate server on one device: an accuracy gate, three scenarios, one score."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Idle OpenMP threads spin otherwise, at the cost of whatever else runs. Every process started here inherits it."""
