"""Build a submission archive from this repository and validate it, or validate one that is there.

Static checks: gzip-compressed tar, start_server.sh at the root, source only, sizes, manifest, sh syntax. Then a dry run
of the unpacked archive: an environment with only the pinned stack is made from what is installed here, the network is
cut where the system allows it, and the server must start, answer and leave MODEL_DIR alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.facts import ROOT, collect_facts
from bench.package.archive import PackageError, write_archive
from bench.package.environment import make_environment
from bench.package.manifest import NAME as MANIFEST_NAME
from bench.package.manifest import Manifest, ManifestError, drafter_bytes, read_manifest
from bench.package.tiny_model import write_tiny_model
from bench.package.validate import Check, check_scripts, validate_archive
from bench.progress import say
from bench.speedrun.isolation import without_network

DRY_RUN_LIMIT_S = 1200.0


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when a check failed, 2 when the archive could not be built."""
    arguments = parse_arguments(argv)
    try:
        if arguments.output:
            names = write_archive(arguments.root, arguments.output, manifest_text(arguments))
            print(f"wrote {arguments.output}: {len(names)} files, {arguments.output.stat().st_size:,} bytes")
        archive: Path = arguments.output or arguments.validate
        checks = [*drafter_checks(arguments), *validate_archive(archive)]
        if all(check.passed for check in checks):
            checks += check_unpacked(archive, arguments)
    except (PackageError, ManifestError, OSError) as error:
        print(f"package: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("package: interrupted", file=sys.stderr)
        return 130
    for check in checks:
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.found}")
    passed = all(check.passed for check in checks)
    if arguments.json:
        record = {"facts": asdict(collect_facts()), "archive": str(archive), "passed": passed}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({**record, "checks": [asdict(check) for check in checks]}, indent=1) + "\n"
        )
    print(f"{archive} is {'valid' if passed else 'NOT valid'}")
    return 0 if passed else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.package",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0; 1 when a check failed; 2 when the archive could not be built.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--output", type=Path, metavar="FILE", help="archive to build and validate, such as submission.tar.gz"
    )
    what.add_argument("--validate", type=Path, metavar="FILE", help="archive to validate")
    add("--root", type=Path, default=ROOT, metavar="DIR", help="what to pack (default: this repository)")
    add("--drafter-repo", metavar="OWNER/NAME", help="declare a drafter; needs --drafter-revision")
    add("--drafter-revision", metavar="SHA", help="full commit sha of the drafter")
    drafter = os.environ.get("DRAFTER_BYO_DIR")
    add(
        "--drafter-dir",
        type=Path,
        default=drafter,
        metavar="DIR",
        help="the drafter's files, for its size (DRAFTER_BYO_DIR)",
    )
    model_dir = os.environ.get("MODEL_DIR")
    add(
        "--model-dir",
        type=Path,
        default=model_dir,
        metavar="DIR",
        help="for the dry run (MODEL_DIR, else a tiny random one)",
    )
    add("--static-only", action="store_true", help="no dry run")
    add("--start-limit-s", type=float, default=300.0, help="for the server to be healthy (%(default)g)")
    add("--json", type=Path, metavar="FILE", help="write the checks as well")
    arguments = parser.parse_args(argv)
    if bool(arguments.drafter_repo) != bool(arguments.drafter_revision):
        parser.error("--drafter-repo and --drafter-revision go together")
    return arguments


def manifest_text(arguments: argparse.Namespace) -> str | None:
    """Of the drafter declared on the command line, else of the root's own manifest.json. Raises ManifestError."""
    if arguments.drafter_repo:
        values = {"drafter_hf_repo": arguments.drafter_repo, "revision": arguments.drafter_revision}
        return dump(read_manifest(json.dumps(values)))
    path: Path = arguments.root / MANIFEST_NAME
    return dump(read_manifest(path.read_text())) if path.is_file() else None


def dump(manifest: Manifest) -> str:
    return manifest.model_dump_json(indent=1) + "\n"


def drafter_checks(arguments: argparse.Namespace) -> list[Check]:
    """Raises ManifestError."""
    if not arguments.drafter_dir:
        return []
    size = drafter_bytes(arguments.drafter_dir)
    return [Check("drafter is at most 2.5 GB", True, f"{size:,} bytes in {arguments.drafter_dir}")]


def check_unpacked(archive: Path, arguments: argparse.Namespace) -> list[Check]:
    """Checks of an unpacked copy in a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="submission-") as name:
        scratch = Path(name)
        submission = scratch / "submission"
        with tarfile.open(archive, "r:gz") as packed:
            packed.extractall(submission, filter="data")
        checks = check_scripts(submission)
        if arguments.static_only or not all(check.passed for check in checks):
            return checks
        say("dry run: an environment with only the pinned stack")
        python = make_environment(scratch / "environment")
        model_dir = arguments.model_dir
        if model_dir is None:
            model_dir = scratch / "model"
            write_tiny_model(model_dir)
        log = scratch / "server.log"
        say(f"dry run: sh start_server.sh with {model_dir.name}")
        return checks + run_isolated(submission, model_dir.resolve(), python, log, arguments.start_limit_s)


def run_isolated(submission: Path, model_dir: Path, python: Path, log: Path, start_limit_s: float) -> list[Check]:
    """The dry run in its own process and network namespace. Raises PackageError when it gave no result."""
    command = [sys.executable, "-m", "bench.package.dry_run", "--submission", str(submission)]
    command += ["--model-dir", str(model_dir), "--python", str(python), "--log", str(log)]
    command += ["--start-limit-s", str(start_limit_s)]
    try:
        done = subprocess.run(
            without_network(command),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=start_limit_s + DRY_RUN_LIMIT_S,
        )
        return [Check(*entry) for entry in json.loads(done.stdout)]
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise PackageError(f"the dry run gave no result: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
