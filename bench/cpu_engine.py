"""The model engine against transformers on CPU, without a server: prefill of one prompt, decode of a batch.

    python3 -m bench.cpu_engine --model models/smollm2-135m-instruct --json build/cpu_engine.json

Both sides run in processes of their own, with the same threads and the same OpenMP settings, and take turns, so that a
machine that slows down slows both. transformers generates the batch's sequences one after the other; tokens per second
of both sides count everything from prompt to last token. Ends with status 1 when a limit is missed or the greedy tokens
differ.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bench.facts import collect_facts
from bench.progress import Progress, say

MOST_PREFILL_RATIO = 1.5
LEAST_DECODE_RATIO = 3.0
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Settings:
    model: str
    threads: int
    prefill_tokens: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


class Side(Protocol):
    """One of the two that are compared."""

    def prefill(self, prompt: list[int]) -> int:
        """Compute a prompt; the most likely next token."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """`num_tokens` greedy tokens after each prompt."""


class Engine:
    def __init__(self, settings: Settings):
        from engine.kv_pool import KVPool
        from engine.runner import ModelRunner, SequenceChunk

        self.runner = ModelRunner.load(settings.model, block_size=BLOCK_SIZE)
        longest = max(settings.prefill_tokens, settings.prompt_tokens + settings.output_tokens)
        self.blocks_each = -(-longest // BLOCK_SIZE)
        self.runner.pool = KVPool.allocate(self.runner.layout, self.blocks_each * settings.batch)
        self.chunk = SequenceChunk

    def table(self, sequence: int) -> list[int]:
        return list(range(sequence * self.blocks_each, (sequence + 1) * self.blocks_each))

    def prefill(self, prompt: list[int]) -> int:
        return int(self.runner.run([self.chunk(prompt, 0, self.table(0))]).argmax())

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        chunks = [self.chunk(prompt, 0, self.table(i)) for i, prompt in enumerate(prompts)]
        outputs: list[list[int]] = [[] for _ in prompts]
        for step in range(num_tokens):
            tokens = self.runner.run(chunks).argmax(-1).tolist()
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
            chunks = [
                self.chunk([token], len(prompt) + step, self.table(i))
                for i, (prompt, token) in enumerate(zip(prompts, tokens, strict=True))
            ]
        return outputs


class Transformers:
    def __init__(self, settings: Settings):
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).eval()

    def prefill(self, prompt: list[int]) -> int:
        with self.torch.inference_mode():
            return int(self.model(self.torch.tensor([prompt]), logits_to_keep=1).logits.argmax())

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            ids = self.torch.tensor([prompt])
            output = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            outputs.append(output[0, len(prompt) :].tolist())
        return outputs


def serve(make_side: Callable[[Settings], Side], settings: Settings, connection: Connection) -> None:
    """Body of a side's process: answers (method, arguments) with (seconds, result) until None comes."""
    side = make_side(settings)
    import torch

    torch.set_num_threads(settings.threads)
    connection.send("ready")
    while (request := connection.recv()) is not None:
        method, arguments = request
        start = time.perf_counter()
        result = getattr(side, method)(*arguments)
        connection.send((time.perf_counter() - start, result))


class Process:
    """A side in its process."""

    def __init__(self, make_side: Callable[[Settings], Side], settings: Settings):
        self.connection, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(make_side, settings, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.receive()

    def timed(self, method: str, *arguments: Any) -> tuple[float, Any]:
        self.connection.send((method, arguments))
        return self.receive()

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(f"a side's process ended with code {self.process.exitcode}; its error is above") from None

    def close(self) -> None:
        if self.process.is_alive():
            self.connection.send(None)
            self.process.join()


@dataclass
class Comparison:
    """Seconds of each repeat on both sides, whether both gave the same tokens, and a limit on `ratio`."""

    what: str
    engine_s: list[float]
    transformers_s: list[float]
    same_tokens: bool
    ratio_name: str
    ratio: float
    passed: bool


def compare(settings: Settings) -> list[Comparison]:
    rng = random.Random(0)
    config = json.loads((Path(settings.model) / "config.json").read_text())
    draw = range(config["vocab_size"])
    long_prompt = rng.choices(draw, k=settings.prefill_tokens)
    prompts = [rng.choices(draw, k=settings.prompt_tokens) for _ in range(settings.batch)]
    say(f"loading {settings.model} on both sides, {settings.threads} threads")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as engine/__init__.py does; the processes inherit it
    engine, reference = Process(Engine, settings), Process(Transformers, settings)
    try:
        prefill = measure("prefill", engine, reference, settings.repeats, "prefill", long_prompt)
        decode = measure("decode", engine, reference, settings.repeats, "generate", prompts, settings.output_tokens)
    finally:
        engine.close()
        reference.close()
    slower = median(prefill[0]) / median(prefill[1])
    faster = median(decode[1]) / median(decode[0])
    return [
        Comparison(
            f"prefill of {settings.prefill_tokens} tokens",
            *prefill,
            f"engine / transformers, at most {MOST_PREFILL_RATIO}",
            slower,
            slower <= MOST_PREFILL_RATIO,
        ),
        Comparison(
            f"{settings.batch} sequences of {settings.prompt_tokens} + {settings.output_tokens} tokens",
            *decode,
            f"tokens per second, engine / transformers, at least {LEAST_DECODE_RATIO}",
            faster,
            faster >= LEAST_DECODE_RATIO,
        ),
    ]


def measure(
    title: str, engine: Process, reference: Process, repeats: int, method: str, *arguments: Any
) -> tuple[list[float], list[float], bool]:
    """Both sides in turn, after one run each that is not counted."""
    same = engine.timed(method, *arguments)[1] == reference.timed(method, *arguments)[1]
    ours: list[float] = []
    theirs: list[float] = []
    with Progress(title, repeats) as progress:
        for repeat in range(repeats):
            ours.append(engine.timed(method, *arguments)[0])
            theirs.append(reference.timed(method, *arguments)[0])
            progress.update(repeat + 1, f"engine {ours[-1]:.2f} s, transformers {theirs[-1]:.2f} s")
    return ours, theirs, same


def report(comparisons: list[Comparison]) -> None:
    for comparison in comparisons:
        print(comparison.what)
        for name, seconds in (("engine", comparison.engine_s), ("transformers", comparison.transformers_s)):
            print(f"    {name:13s} median {median(seconds):.3f} s, {min(seconds):.3f} to {max(seconds):.3f} s")
        print(f"    {comparison.ratio_name}: {comparison.ratio:.2f} {'ok' if comparison.passed else 'MISSED'}")
        print(f"    same greedy tokens: {'yes' if comparison.same_tokens else 'NO'}")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.cpu_engine", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face model directory")
    parser.add_argument(
        "--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each side (%(default)s)"
    )
    parser.add_argument("--prefill-tokens", type=positive, default=512, help="(%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences decoded together (%(default)s)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="of each sequence decoded (%(default)s)")
    parser.add_argument("--output-tokens", type=positive, default=64, help="(%(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    arguments = vars(parser.parse_args(argv))
    record = arguments.pop("json")
    settings = Settings(**arguments)
    if not (Path(settings.model) / "config.json").is_file():
        print(f"{settings.model} has no config.json; make the embedded model with `make model`", file=sys.stderr)
        return 2
    comparisons = compare(settings)
    report(comparisons)
    if record is not None:
        content = {"facts": asdict(collect_facts()), "settings": asdict(settings)}
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({**content, "comparisons": [asdict(c) for c in comparisons]}, indent=2) + "\n")
        print(f"record: {record}")
    return 0 if all(comparison.passed and comparison.same_tokens for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
