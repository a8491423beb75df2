"""Runs a command where there is no network, as far as this system lets an ordinary user do that."""

import functools
import shutil
import subprocess
from collections.abc import Sequence

PREFIX = ("unshare", "--user", "--map-root-user", "--net", "--")


@functools.cache
def can_cut_network() -> bool:
    """True where an ordinary user may make a network namespace of their own."""
    if shutil.which(PREFIX[0]) is None:
        return False
    return subprocess.run([*PREFIX, "true"], capture_output=True).returncode == 0


def without_network(command: Sequence[str]) -> list[str]:
    """`command` in a namespace that holds nothing but a loopback device (which is down), where that is possible."""
    return [*PREFIX, *command] if can_cut_network() else list(command)
