"""The configuration reference as Markdown, from the configuration model itself.

python3 -m bench.config_reference                      prints it
python3 -m bench.config_reference --write README.md    writes it between the markers in that file
"""

import argparse
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union

from annotated_types import Ge, Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config import DeploymentConfig

BEGIN = "<!-- configuration reference: written by `make docs` -->"
END = "<!-- end of the configuration reference -->"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.config_reference", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the reference in this file")
    path = parser.parse_args(argv).write
    if path is None:
        print(reference())
        return 0
    try:
        path.write_text(with_reference(path.read_text()))
    except (OSError, ValueError) as error:
        print(f"config_reference: {path}: {error}", file=sys.stderr)
        return 1
    return 0


def with_reference(text: str) -> str:
    """`text` with what stands between the markers replaced. Raises ValueError without markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, foot = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no markers {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n{reference()}\n{END}{foot}"


def reference() -> str:
    """One table, a row a key."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, field in keys(DeploymentConfig):
        values = describe(field.annotation) + bounds(field)
        cells = (f"`{key}`", values, f"`{yaml_value(field.default)}`", field.description or "")
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every value, depth first."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def describe(annotation: Any) -> str:
    """A type in a reader's words: choices as they are written in YAML, `or` between alternatives."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(describe(part) for part in typing.get_args(annotation) if part is not NoneType)
    if origin is list:
        return f"list of {describe(typing.get_args(annotation)[0])}s"
    names = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}
    names |= {re.Pattern[str]: "regular expression"}
    if annotation in names:
        return names[annotation]
    raise TypeError(f"no words for {annotation!r}; add them here")


def bounds(field: FieldInfo) -> str:
    for limit in field.metadata:
        if isinstance(limit, Ge):
            return f", at least {limit.ge}"
        if isinstance(limit, Gt):
            return f", above {limit.gt}"
    return ""


def yaml_value(value: Any) -> str:
    """A default as YAML writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return '""' if value == "" else str(value)


if __name__ == "__main__":
    sys.exit(main())
