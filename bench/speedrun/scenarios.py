"""The three scenarios and their sizes.

chat    S1  sequential requests, long answers              ms per output token
long    S2  sequential requests, one long document each    ms to the first token
burst   S3  all requests at once                           output tokens per second
"""

from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import Tokenizer

from bench.speedrun.prompts import Message, chat_prompt, document_prompt

ScenarioName = Literal["chat", "long", "burst"]


@dataclass(frozen=True)
class Scenario:
    """`prompt_tokens` is the text's, the chat template's come on top. `at_once`: requests are sent together."""

    name: ScenarioName
    title: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    at_once: bool = False

    @property
    def metric(self) -> str:
        return {"chat": "TPOT, ms/token", "long": "TTFT, ms", "burst": "output tokens/s"}[self.name]

    @property
    def higher_is_better(self) -> bool:
        return self.name == "burst"

    def prompts(self, tokenizer: Tokenizer, seed: int, draw: str) -> list[list[Message]]:
        """Another `draw` has other prompts: every repeat its own, so that no cache of an earlier one helps."""
        make = document_prompt if self.name == "long" else chat_prompt
        return [
            make(tokenizer, f"{seed}/{self.name}/{draw}", index, self.prompt_tokens) for index in range(self.requests)
        ]


def scenarios(
    chat: tuple[int, int, int], long: tuple[int, int, int], burst: tuple[int, int, int]
) -> tuple[Scenario, ...]:
    """Each argument: requests, prompt tokens, output tokens."""
    return (
        Scenario("chat", "S1 chat", *chat),
        Scenario("long", "S2 long prompt", *long),
        Scenario("burst", "S3 burst", *burst, at_once=True),
    )


def warm_up(scenario: Scenario) -> Scenario:
    """One request of the same shape with a short answer, so that what is done once is done before the clock runs."""
    return replace(scenario, requests=1, output_tokens=min(8, scenario.output_tokens))


SIZES = {
    "full": scenarios((6, 250, 256), (3, 4096, 16), (32, 250, 128)),
    "kit": scenarios((1, 250, 256), (1, 4096, 16), (8, 250, 128)),
    "cpu": scenarios((3, 96, 48), (2, 768, 8), (8, 64, 32)),
    "quick-cpu": scenarios((1, 96, 48), (1, 768, 8), (8, 64, 32)),
}
