"""Three figures of a server that already runs: one chat, one long prompt and a small burst."""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from bench.demo import health
from bench.facts import collect_facts
from bench.progress import Progress, say
from bench.speedrun.client import Measurement, run_scenario
from bench.speedrun.launch import START_LIMIT_S
from bench.speedrun.model_files import load_tokenizer
from bench.speedrun.scenarios import Scenario, warm_up
from bench.speedrun.score import judge, value_of
from bench.speedrun.settings import Settings

LIMIT_S = 600.0


def run_quick(settings: Settings, url: str) -> tuple[list[str], dict[str, Any], bool]:
    """Lines to print, the JSON record, and whether every scenario gave a figure. Raises ModelFilesError, OSError."""
    tokenizer = load_tokenizer(settings.model_dir)
    wait_until_ready(url)
    lines, values, measurements = [], {}, []
    for scenario in settings.scenarios:
        if not scenario.at_once:
            measure(settings, url, warm_up(scenario), tokenizer, "warm-up")
        measurement = measure(settings, url, scenario, tokenizer, "0")
        outcome, reason = judge(scenario, measurement, None)
        lines.append(f"{outcome}: {reason}" if reason else quick_line(scenario, measurement))
        values[scenario.name] = None if reason else value_of(scenario, measurement)
        measurements.append(asdict(measurement) | {"outcome": outcome, "reason": reason})
    record = {
        "kind": "measured",
        "benchmark": "speedrun-quick",
        "facts": asdict(collect_facts()),
        "url": url,
        "count": settings.count,
        "scenarios": [asdict(scenario) for scenario in settings.scenarios],
        "values": values,
        "measurements": measurements,
    }
    return lines, record, None not in values.values()


def measure(settings: Settings, url: str, scenario: Scenario, tokenizer: Any, draw: str) -> Measurement:
    prompts = scenario.prompts(tokenizer, settings.seed, draw)
    model = settings.model_dir.resolve().name
    with Progress(f"{scenario.title} {draw if draw == 'warm-up' else ''}".rstrip(), scenario.requests) as bar:
        return asyncio.run(run_scenario(url, model, scenario, prompts, tokenizer, settings.count, LIMIT_S, bar.update))


def quick_line(scenario: Scenario, measurement: Measurement) -> str:
    value = value_of(scenario, measurement)
    if scenario.name == "chat":
        return f"S1 chat: TPOT {value:.1f} ms/token ({1e3 / value:.1f} tok/s)"
    if scenario.name == "long":
        return f"S2 long prompt: TTFT {value / 1e3:.2f} s at {scenario.prompt_tokens} tokens"
    return f"S3 burst: {value:.1f} output tok/s over {scenario.requests} requests at once"


def wait_until_ready(url: str) -> None:
    """Raises TimeoutError, an OSError."""
    started = time.monotonic()
    while health(url) != 200:
        if time.monotonic() - started > START_LIMIT_S:
            raise TimeoutError(
                f"{url}/health does not answer 200 after {START_LIMIT_S:g} s; is the server running there?"
            )
        time.sleep(0.2)
    say(f"server ready ({time.monotonic() - started:.0f} s)")
