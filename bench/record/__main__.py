"""Publish the experiment record's JSON schema, or check records against it.

python3 -m bench.record --schema docs/experiment_record.schema.json
python3 -m bench.record build/optimize/*.json
"""

import argparse
import json
import sys
from pathlib import Path

from bench.record.make import RecordError, read_record
from bench.record.schema import json_schema


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when a record is not valid, 2 when there is nothing to do."""
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 when every record is valid, 1 when one is not, 2 when there is nothing to do.",
    )
    parser.add_argument("records", type=Path, nargs="*", metavar="FILE", help="records to check")
    parser.add_argument("--schema", type=Path, metavar="FILE", help="write the JSON schema to this file")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    arguments = parser.parse_args(argv)
    if not arguments.records and arguments.schema is None:
        print("record: give records to check, or --schema FILE; see --help", file=sys.stderr)
        return 2
    if arguments.schema is not None:
        arguments.schema.write_text(json_schema())
    verdicts = [{"record": str(path), "error": error_of(path)} for path in arguments.records]
    if arguments.json:
        print(json.dumps(verdicts, indent=1))
    else:
        for verdict in verdicts:
            print(f"{verdict['record']}: {verdict['error'] or 'valid'}")
    return 1 if any(verdict["error"] for verdict in verdicts) else 0


def error_of(path: Path) -> str:
    try:
        read_record(path)
    except RecordError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
