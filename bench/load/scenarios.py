"""What is sent: how many requests at once, how long, how often, and which figure is read from them."""

import random
from dataclasses import dataclass
from typing import Literal

Figure = Literal["tpot_ms", "ttft_ms", "output_tokens_per_s"]


@dataclass(frozen=True)
class Scenario:
    """`repeats` rounds, after `warmups` that are not counted; in each, `requests` are sent at once."""

    name: str
    figure: Figure
    requests: int
    prompt_tokens: int
    output_tokens: int
    repeats: int
    warmups: int = 1

    @property
    def text(self) -> str:
        what = {
            "tpot_ms": "TPOT of one stream",
            "ttft_ms": "TTFT of one request",
            "output_tokens_per_s": f"output tokens/s of {self.requests} requests at once",
        }[self.figure]
        return f"{what}, {self.prompt_tokens} in, {self.output_tokens} out"


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("tpot", "tpot_ms", 1, 200, 256, repeats=5),
        Scenario("ttft-200", "ttft_ms", 1, 200, 4, repeats=20, warmups=2),
        Scenario("ttft-4096", "ttft_ms", 1, 4096, 4, repeats=10, warmups=2),
        Scenario("burst-8", "output_tokens_per_s", 8, 256, 128, repeats=3),
        Scenario("burst-32", "output_tokens_per_s", 32, 256, 128, repeats=3),
        Scenario("burst-128", "output_tokens_per_s", 128, 256, 128, repeats=3),
    )
}


class Prompts:
    """Random token ids. No two prompts of one run begin alike, so none finds another's blocks in a cache."""

    FIRST_ID = 1000
    """Smaller ids are often control tokens."""

    def __init__(self, seed: int, vocab_size: int):
        """`vocab_size` must exceed FIRST_ID by far, or distinct beginnings run out; the ids are below it."""
        self._draws = random.Random(seed)
        self._ids = range(self.FIRST_ID, vocab_size)
        self._beginnings: set[tuple[int, ...]] = set()

    def draw(self, num_tokens: int) -> list[int]:
        while True:
            prompt = self._draws.choices(self._ids, k=num_tokens)
            beginning = tuple(prompt[:4])
            if beginning not in self._beginnings:
                self._beginnings.add(beginning)
                return prompt
