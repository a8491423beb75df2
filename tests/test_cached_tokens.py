"""`cached_tokens` on recorded coding-agent sessions equals what an independent oracle counts.

Each recorded 64-token block becomes one 4-token KV block whose tokens follow from its hash id, so the sessions keep
their hit structure. The oracle knows nothing of the cache: it remembers prompts and counts contiguous leading blocks
seen before, at most all but the last token.
"""

import json
import random
from pathlib import Path

import pytest

from tests.cluster import Cluster, make_config, make_request

SESSIONS = sorted((Path(__file__).parent / "data" / "coding_agent").glob("*.json"))
RECORDED_BLOCK, BLOCK = 64, 4


def recorded_requests(path: Path) -> list[dict]:
    """A session's requests in order of time, those of sub-agents included."""

    def walk(requests: list[dict], start: float) -> list[dict]:
        found = []
        for request in requests:
            if request.get("hash_ids"):
                found.append({**request, "t": start + request["t"]})
            found += walk(request.get("requests", []), start + request.get("t", 0.0))
        return found

    return sorted(walk(json.loads(path.read_text())["requests"], 0.0), key=lambda request: request["t"])


def scaled_prompt(request: dict, index: int) -> list[int]:
    prompt: list[int] = []
    for hash_id in request["hash_ids"]:
        rng = random.Random(hash_id)
        prompt += [rng.randrange(4, 500) for _ in range(BLOCK)]
    tail = request["in"] - RECORDED_BLOCK * len(request["hash_ids"])
    if tail > 0:
        rng = random.Random(f"tail {index}")
        prompt += [rng.randrange(4, 500) for _ in range(max(1, tail * BLOCK // RECORDED_BLOCK))]
    return prompt


class Oracle:
    """A trie of every prompt so far, one block an edge."""

    def __init__(self) -> None:
        self.root: dict = {}

    def count(self, prompt: list[int]) -> int:
        node, cached, known = self.root, 0, True
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            block = tuple(prompt[start : start + BLOCK])
            known = known and block in node
            cached += known
            node = node.setdefault(block, {})
        return min(cached, (len(prompt) - 1) // BLOCK) * BLOCK


@pytest.mark.parametrize("topology", ["colocated", "shm", "tcp"])
def test_cached_tokens_equal_the_oracle_on_recorded_sessions(tiny_model, topology):
    assert len(SESSIONS) == 14
    config = make_config(
        topology, block_size=BLOCK, pool_tokens=16384, max_model_len=8192, chunk_tokens=1024, max_running=2
    )
    cluster = Cluster(str(tiny_model("llama", max_position_embeddings=8192)), config)
    total = hits = 0
    try:
        for path in SESSIONS:
            oracle = Oracle()
            for worker in [*cluster.prefill, *cluster.decode]:
                worker.flush()
            for index, request in enumerate(recorded_requests(path)):
                prompt = scaled_prompt(request, index)
                name = f"{path.stem}-{index}"
                cluster.submit(make_request(name, prompt, max_tokens=1))
                cluster.run()
                report = cluster.deltas[name][0].prefill
                expected = oracle.count(prompt)
                assert report is not None and report.num_cached_tokens == expected, name
                total, hits = total + len(prompt), hits + expected
        assert hits / total > 0.85  # the recorded sessions' ideal hit rates are 85 to 98 %
        cluster.check_whole()
    finally:
        cluster.close()
