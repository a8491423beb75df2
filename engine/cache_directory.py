"""Where what was built or found out for this machine is kept."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$BATON_CACHE, default ~/.cache/baton. It need not exist yet."""
    return Path(os.environ.get("BATON_CACHE") or "~/.cache/baton").expanduser()
