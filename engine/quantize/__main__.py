"""Quantize a model into a directory that the service loads like any other.

A run that was interrupted goes on where it stopped when it is started again with the same arguments. Memory: about one
decoder layer in float32 beside the embedding, so a 4B model fits a 16 GB GPU (or the host's memory).
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from engine.models.config import ModelError
from engine.quantize.calibration import CALIBRATION_TEXT, SAMPLE_TOKENS, load_tokenizer, samples
from engine.quantize.forward import STAGES
from engine.quantize.layerwise import METHODS, REPORT_FILE, LayerwiseQuantizer
from engine.quantize.scheme import Precision


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    precision = Precision(arguments.scheme, arguments.head, arguments.embedding)
    try:
        tokenizer = load_tokenizer(arguments.model_dir)
        tokens = samples(tokenizer, arguments.text, arguments.sample_tokens, arguments.samples)
        say(f"{tokens.shape[0]} samples of {tokens.shape[1]} tokens, on {device}")
        quantizer = LayerwiseQuantizer(
            arguments.model_dir, arguments.out, precision, arguments.method, tokens, device, say
        )
        report = quantizer.run()
    except (ModelError, OSError) as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(f"quantize: GPU memory is short ({str(error)[:120]}); give fewer --samples", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report))
    else:
        print(table(report))
        say(f"wrote {arguments.out}: {report['bytes'] / 1e6:.0f} MB; report in {arguments.out / REPORT_FILE}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m engine.quantize",
        description=__doc__,
        epilog="example: python3 -m engine.quantize models/smollm2-135m-instruct --scheme w4a16 --method awq+gptq "
        "--head int8 --out models/smollm2-w4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", type=Path, help="unquantized Hugging Face directory")
    parser.add_argument(
        "--scheme",
        required=True,
        choices=("w4a16", "w8a16", "w8a8", "mixed"),
        help="w4a16: int4 weights in groups of 128; w8a16: int8 weights; w8a8: int8 weights and activations, smoothed; "
        "mixed: int4, down projections int8",
    )
    parser.add_argument("--out", required=True, type=Path, help="directory to write (new, or of an interrupted run)")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="awq+gptq",
        help="rtn: round to nearest; awq: scale inputs first; gptq: make up for errors; (default: %(default)s)",
    )
    parser.add_argument("--head", choices=("full", "int8", "int4"), default="full", help="precision of the output head")
    parser.add_argument("--embedding", choices=("full", "int8"), default="full", help="precision of the embedding")
    parser.add_argument(
        "--text", type=Path, default=CALIBRATION_TEXT, help="calibration text (default: the one shipped)"
    )
    parser.add_argument("--samples", type=positive, default=None, help="sequences to calibrate with (default: all)")
    parser.add_argument("--sample-tokens", type=positive, default=SAMPLE_TOKENS, help="tokens of each (%(default)s)")
    parser.add_argument("--device", default=None, help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    parser.add_argument("--threads", type=positive, default=None, help="CPU threads (default: all)")
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON; progress goes to stderr either way"
    )
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def table(report: dict) -> str:
    """Relative output error of each layer and stage."""
    lines = ["layer  " + "".join(f"{stage:>15}" for stage in STAGES)]
    for row in report["errors"]:
        cells = "".join(f"{row[stage]:15.4f}" if stage in row else f"{'-':>15}" for stage in STAGES)
        lines.append(f"{row['layer']:5d}  {cells}")
    return "\n".join(lines)


def say(text: str) -> None:
    print(f"quantize: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
