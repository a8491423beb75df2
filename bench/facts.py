"""Facts that a measurement is worth little without: code, command, machine, versions."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "fastapi",
    "uvicorn",
    "httpx",
    "pyzmq",
)

Kind = Literal["measured", "projected", "simulated"]


@dataclass
class Facts:
    """Where and how a result was made. `commit` ends in "+changes" when the work tree differs from it; "" without git.
    `devices` are the GPUs of this machine, with driver and memory as nvidia-smi prints them."""

    kind: Kind
    time: str
    command: str
    commit: str
    python: str
    platform: str
    processor: str
    cores: int
    memory_gib: float
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def collect_facts(kind: Kind = "measured") -> Facts:
    return Facts(
        kind=kind,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command_line(),
        commit=commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        devices=output(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        ).splitlines(),
        versions=package_versions(),
    )


def command_line() -> str:
    """The command as one would type it again."""
    program = Path(sys.argv[0]).resolve()
    if program.suffix == ".py" and ROOT in program.parents:
        module = program.parent if program.name == "__main__.py" else program.with_suffix("")
        return shlex.join(["python3", "-m", ".".join(module.relative_to(ROOT).parts), *sys.argv[1:]])
    return shlex.join(sys.argv)


def commit() -> str:
    head = output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") if head else ""
    return head + ("+changes" if changed else "")


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def output(*command: str) -> str:
    """What a command prints; "" when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""
