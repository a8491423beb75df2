"""Python source text made by rule: what a coding agent's context looks like, the same on every machine for a seed."""

import random
from collections.abc import Iterator

DOMAINS = {
    "inventory": ("item", "warehouse", "bin", "order", "supplier", "lot"),
    "scheduling": ("job", "queue", "worker", "deadline", "slot", "attempt"),
    "billing": ("invoice", "account", "charge", "refund", "payment", "ledger"),
    "routing": ("node", "edge", "path", "hop", "weight", "region"),
    "parsing": ("token", "rule", "grammar", "symbol", "span", "buffer"),
    "telemetry": ("metric", "sample", "gauge", "window", "label", "alert"),
    "storage": ("page", "segment", "record", "cursor", "snapshot", "journal"),
    "messaging": ("topic", "message", "consumer", "offset", "partition", "receipt"),
}
"""Eight subjects, one a session, each with its nouns."""

VERBS = (
    "load",
    "merge",
    "resolve",
    "collect",
    "apply",
    "validate",
    "split",
    "rank",
    "update",
    "compact",
    "drain",
    "match",
)
QUALITIES = ("pending", "active", "stale", "primary", "shared", "local", "recent", "total", "nested", "cached")
CLASS_SUFFIXES = ("Store", "Planner", "Registry", "Monitor", "Reader")
REMARKS = (
    "Callers hold the lock.",
    "Order of the result follows the order of the input.",
    "Duplicates keep their first position.",
    "Nothing is written when the check fails.",
    "An empty input gives an empty result.",
    "The caller decides what a missing value means.",
)
REQUESTS = (
    "Why does {name} return an empty list when {field} is zero? Find the cause and fix it.",
    "Add a limit to {name} so that it stops after the first {field} that does not match.",
    "Write a test for {name} that covers a missing {field}, then run the suite.",
    "Rename {field} in {name} and in every caller; keep the old name working for one release.",
    "{name} is slow on large inputs. Show where the time goes and propose a change.",
)


def session_text(seed: int, session: int) -> Iterator[str]:
    """Modules of one session's code base, without end: an agent's instructions, then file after file.

    Sessions differ from their first line on, so no two share a cached block.
    """
    domain = list(DOMAINS)[session % len(DOMAINS)]
    rng = random.Random(f"session/{seed}/{session}")
    yield (
        f"# {domain} service {rng.getrandbits(32):08x}\n"
        f"You edit the Python code base of the service `{domain}`. Read the files below, answer with a patch, and\n"
        "keep the public names as they are.\n\n"
    )
    number = 0
    while True:
        yield module_text(rng, domain, number)
        number += 1


def turn_text(seed: int, level: str, index: int, session: int) -> Iterator[str]:
    """Text of one request's new input, without end: a task, then code to look at.

    Opens with a tag of its own, so that no part of it can be cached by an earlier request.
    """
    rng = random.Random(f"turn/{seed}/{level}/{index}")
    domain = list(DOMAINS)[session % len(DOMAINS)]
    name, field = function_name(rng, domain), rng.choice(DOMAINS[domain])
    yield f"# {rng.getrandbits(32):08x}\n{rng.choice(REQUESTS).format(name=name, field=field)}\n\n"
    while True:
        yield function_text(rng, domain, indent="")


def module_text(rng: random.Random, domain: str, number: int) -> str:
    """One file: a heading, imports, a dataclass, a class and free functions. Valid Python."""
    noun = rng.choice(DOMAINS[domain])
    parts = [
        f"# file: {domain}/{noun}_{rng.choice(VERBS)}_{number}.py\n",
        f'"""The {rng.choice(QUALITIES)} {noun}s of the {domain} service."""\n\n',
        "from dataclasses import dataclass, field\n\n\n",
        dataclass_text(rng, domain),
        class_text(rng, domain),
    ]
    parts += [function_text(rng, domain, indent="") for _ in range(rng.randrange(1, 4))]
    return "".join(parts)


def dataclass_text(rng: random.Random, domain: str) -> str:
    noun = rng.choice(DOMAINS[domain])
    lines = [f"@dataclass\nclass {rng.choice(QUALITIES).title()}{noun.title()}:\n"]
    for name in rng.sample(DOMAINS[domain], 3):
        kind = rng.choice(("int = 0", "float = 0.0", 'str = ""', "list[str] = field(default_factory=list)"))
        lines.append(f"    {rng.choice(QUALITIES)}_{name}: {kind}\n")
    return "".join(lines) + "\n\n"


def class_text(rng: random.Random, domain: str) -> str:
    noun, other = rng.sample(DOMAINS[domain], 2)
    head = (
        f"class {noun.title()}{rng.choice(CLASS_SUFFIXES)}:\n"
        f'    """Keeps every {noun} by its {other}."""\n\n'
        f"    def __init__(self, limit: int = {rng.randrange(8, 4096)}) -> None:\n"
        f"        self.limit = limit\n"
        f"        self.{noun}s: dict[str, list[int]] = {{}}\n\n"
    )
    methods = [function_text(rng, domain, indent="    ") for _ in range(rng.randrange(2, 4))]
    return head + "".join(methods) + "\n"


def function_text(rng: random.Random, domain: str, indent: str) -> str:
    """A function (or, indented, a method) over the domain's nouns."""
    noun, other = rng.sample(DOMAINS[domain], 2)
    quality, bound = rng.choice(QUALITIES), rng.randrange(2, 500)
    receiver = "self, " if indent else ""
    body = rng.choice(
        (
            f"{quality} = []\nfor {noun} in {noun}s:\n    if {noun} % {bound} == 0 or {noun} > {other}:\n"
            f"        {quality}.append({noun} - {other})\nreturn {quality}\n",
            f"{quality} = sorted(set({noun}s), key=lambda {noun}: ({noun} % {bound}, {noun}))\n"
            f"return {quality}[:{other}] if {other} else {quality}\n",
            f"if {other} < 0:\n    raise ValueError(f'{other} must be at least 0, got {{{other}}}')\n"
            f"{quality} = [{noun} * {bound} for {noun} in {noun}s]\nreturn {quality} + [{other}]\n",
            f"{quality}: list[int] = []\nwhile {noun}s and len({quality}) < {bound}:\n    {noun} = {noun}s.pop()\n"
            f"    if {noun} != {other}:\n        {quality}.append({noun})\nreturn {quality}\n",
        )
    )
    arguments = f"{receiver}{noun}s: list[int], {other}: int = {rng.randrange(100)}"
    lines = [
        f"def {function_name(rng, domain)}({arguments}) -> list[int]:",
        f'    """{rng.choice(VERBS).title()} {quality} {noun}s by {other}. {rng.choice(REMARKS)}"""',
        *(f"    {line}" for line in body.splitlines()),
    ]
    return "\n".join(indent + line for line in lines) + ("\n\n" if indent else "\n\n\n")


def function_name(rng: random.Random, domain: str) -> str:
    return f"{rng.choice(VERBS)}_{rng.choice(QUALITIES)}_{rng.choice(DOMAINS[domain])}s"
