"""Measure what each scheme costs in quality, against the full model: the table that `auto` obeys.

For each combination of scheme, method and head the model is quantized into WORK (again only where it is missing) and
compared on the held-out text that ships with the project:

    perplexity    and its rise over the full model's
    agreement     share of positions at which both models' most likely tokens are the same
    divergence    mean share of the full model's greedy continuations before the first other token
    error         mean and largest relative error of the linear layers' outputs on the calibration text
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from engine.kv_pool import KVPool
from engine.models.config import ModelConfig, ModelError
from engine.quantize.__main__ import say
from engine.quantize.calibration import HELD_OUT_TEXT, load_tokenizer, samples
from engine.quantize.floor import LEAST_AGREEMENT, MOST_PERPLEXITY_RISE, passes
from engine.quantize.forward import STAGES, model_logits
from engine.quantize.layerwise import REPORT_FILE, LayerwiseQuantizer
from engine.quantize.scheme import Precision
from engine.runner import ModelRunner, SequenceChunk
from engine.weights import load_weights

COMBINATIONS = (
    ("w4a16", "rtn", "full"),
    ("mixed", "rtn", "full"),
    ("w8a16", "rtn", "full"),
    ("w8a8", "rtn", "full"),
    ("w4a16", "gptq", "full"),
    ("w4a16", "awq", "full"),
    ("w4a16", "awq+gptq", "full"),
    ("mixed", "gptq", "full"),
    ("none", "rtn", "int8"),
    ("none", "rtn", "int4"),
    ("w4a16", "awq+gptq", "int8"),
)
"""(scheme, method, head); the embedding stays full."""
ROW_TOKENS = 256
PROMPTS, PROMPT_TOKENS, CONTINUATION = 8, 32, 32
CALIBRATION_SAMPLES = 12


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m engine.quantize.quality", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="unquantized Hugging Face directory")
    parser.add_argument("--work", type=Path, required=True, help="directory for the quantized models")
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file to write; rows it has are not measured again"
    )
    parser.add_argument("--only", default="", help="comma-separated scheme:method:head (default: all)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: all)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    chosen = tuple(tuple(item.split(":")) for item in arguments.only.split(",") if item) or COMBINATIONS
    try:
        rows = measure(arguments.model_dir, arguments.work, arguments.out, chosen)
    except (ModelError, OSError, ValueError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 1
    print(json.dumps(rows) if arguments.json else table(rows))
    return 0


def measure(model_dir: Path, work: Path, out: Path, combinations: tuple) -> list[dict[str, Any]]:
    """Rows of every combination, kept in `out` as they come."""
    known: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"model": model_dir.name, "rows": []}
    held_out = samples(load_tokenizer(model_dir), HELD_OUT_TEXT, ROW_TOKENS)
    reference = Reference(model_dir, held_out)
    known |= {"perplexity": round(reference.perplexity, 3), "tokens": held_out.numel()}
    known |= {"floor": {"perplexity_rise": MOST_PERPLEXITY_RISE, "agreement": LEAST_AGREEMENT}}
    for scheme, method, head in combinations:
        if any((row["scheme"], row["method"], row["head"]) == (scheme, method, head) for row in known["rows"]):
            continue
        started = time.monotonic()
        directory = work / f"{scheme}-{method}-{head}".replace("+", "-")
        report = quantize(model_dir, directory, Precision(scheme, head), method)
        figures = reference.compare(directory)
        errors = [row[stage] for row in report["errors"] for stage in STAGES if stage in row]
        row = {"scheme": scheme, "method": method, "head": head, **figures, "bytes": report["bytes"]}
        row |= {"mean_error": round(sum(errors) / max(1, len(errors)), 5), "largest_error": max(errors, default=0.0)}
        row["largest_error"] = round(row["largest_error"], 5)
        row["passes"] = passes(row)
        known["rows"].append(row)
        out.write_text(json.dumps(known, indent=1) + "\n")
        say(f"{scheme} {method} head {head}: {figures} after {time.monotonic() - started:.0f} s")
    return known["rows"]


def quantize(model_dir: Path, directory: Path, precision: Precision, method: str) -> dict[str, Any]:
    path = directory / REPORT_FILE
    if path.is_file() and (directory / "config.json").is_file():
        return json.loads(path.read_text())
    tokens = samples(load_tokenizer(model_dir), most=CALIBRATION_SAMPLES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return LayerwiseQuantizer(model_dir, directory, precision, method, tokens, device, say).run()  # type: ignore[arg-type]


class Reference:
    """What the full model makes of the held-out text `[rows, ROW_TOKENS]` and of prompts cut from it."""

    def __init__(self, model_dir: Path, held_out: torch.Tensor):
        self.held_out = held_out
        pieces = held_out.view(-1, PROMPT_TOKENS)
        self.prompts = pieces[torch.linspace(0, len(pieces) - 1, PROMPTS).long()]
        self.continued = torch.cat([self.prompts, self._continue(model_dir)], 1)
        self.losses, self.tokens = self._read(model_dir, held_out)
        self.perplexity = math.exp(self.losses)

    @torch.inference_mode()
    def compare(self, directory: Path) -> dict[str, float]:
        losses, tokens = self._read(directory, self.held_out)
        _, continued = self._read(directory, self.continued)
        same = continued[:, PROMPT_TOKENS - 1 :] == self.continued[:, PROMPT_TOKENS:]
        before = same.long().cumprod(1).sum(1).double().mean() / CONTINUATION
        return {
            "perplexity": round(math.exp(losses), 3),
            "perplexity_rise": round(math.exp(losses - self.losses) - 1, 4),
            "agreement": round(float((tokens == self.tokens).double().mean()), 4),
            "divergence": round(float(before), 3),
        }

    @torch.inference_mode()
    def _read(self, directory: Path, rows: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Mean loss, and each position's most likely next token `[rows, T - 1]`."""
        config = ModelConfig.from_dir(directory)
        weights = load_weights(config, directory, "files", torch.float32, torch.device("cpu"))
        losses, tokens = [], []
        for row, logits in zip(rows, model_logits(config, weights, rows)):
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], row[1:]))
            tokens.append(logits[:-1].argmax(1))
        return float(torch.stack(losses).double().mean()), torch.stack(tokens)

    def _continue(self, model_dir: Path) -> torch.Tensor:
        """The full model's greedy continuation of each prompt, `[PROMPTS, CONTINUATION]`, as the service makes it."""
        length = PROMPT_TOKENS + CONTINUATION
        runner = ModelRunner.load(model_dir, dtype="float32", block_size=length, max_model_len=length)
        runner.use_pool(KVPool.allocate(runner.layout, PROMPTS))
        rows: list[list[int]] = self.prompts.tolist()
        logits = runner.run([SequenceChunk(row, 0, [index]) for index, row in enumerate(rows)])
        while True:
            for row, token in zip(rows, logits.argmax(1).tolist()):
                row.append(token)
            if len(rows[0]) == length:
                return torch.tensor(rows)[:, PROMPT_TOKENS:]
            chunks = [SequenceChunk(row[-1:], len(row) - 1, [index]) for index, row in enumerate(rows)]
            logits = runner.run(chunks)


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    columns = "scheme method head MB perplexity rise agreement divergence error largest floor".split()
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row["scheme"], row["method"], row["head"], f"{row['bytes'] / 1e6:.0f}", f"{row['perplexity']:.2f}"]
        cells += [f"{row['perplexity_rise']:+.1%}", f"{row['agreement']:.1%}", f"{row['divergence']:.0%}"]
        cells += [f"{row['mean_error']:.4f}", f"{row['largest_error']:.4f}", "passes" if row["passes"] else "below"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
