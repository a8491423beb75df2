"""What a decode worker promises about single requests, in every topology."""

import random

import pytest
import torch
import transformers

from tests.cluster import TOPOLOGIES, Cluster, make_config, make_request

PROMPT = [random.Random(1).randrange(4, 500) for _ in range(21)]


@pytest.fixture(params=list(TOPOLOGIES))
def cluster(request, tiny_model):
    cluster = Cluster(str(tiny_model("qwen3")), make_config(request.param))
    yield cluster
    cluster.check_whole()
    cluster.close()


@pytest.fixture
def hf(tiny_model):
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32).eval()


def greedy(hf, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(hf(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def serve(cluster: Cluster, **sampling):
    cluster.submit(make_request("r", PROMPT, **sampling))
    cluster.run()
    return cluster.deltas["r"]


def test_greedy_tokens_equal_transformers(cluster, hf):
    serve(cluster, max_tokens=16)
    assert cluster.tokens("r") == greedy(hf, PROMPT, 16)


def test_max_tokens_1_gives_one_token_and_no_decode_leg(cluster, hf):
    deltas = serve(cluster, max_tokens=1)
    assert cluster.tokens("r") == greedy(hf, PROMPT, 1)
    assert deltas[-1].finish_reason == "length"
    assert deltas[0].prefill.num_blocks_sent == 0
    assert cluster.decode[0].engine.counters["decode_steps_total"] == 0


def test_a_first_token_that_ends_the_request_needs_no_decode_leg(cluster, hf):
    first = greedy(hf, PROMPT, 1)
    deltas = serve(cluster, eos_token_ids=first)
    assert [delta.finish_reason for delta in deltas] == ["stop"]
    assert deltas[0].stop_token_id == first[0]
    assert cluster.decode[0].engine.counters["decode_steps_total"] == 0


def test_ignore_eos_and_min_tokens_hold_on_the_prefill_side_too(cluster, hf):
    first = greedy(hf, PROMPT, 1)
    serve(cluster, max_tokens=6, eos_token_ids=first, ignore_eos=True)
    assert cluster.tokens("r") == greedy(hf, PROMPT, 6)
    cluster.submit(make_request("m", PROMPT, max_tokens=6, eos_token_ids=first, min_tokens=3))
    cluster.run()
    tokens = cluster.tokens("m")
    assert len(tokens) >= 3 and first[0] not in tokens[:3]


def test_a_stop_token_ends_the_request_even_with_ignore_eos(cluster, hf):
    expected = greedy(hf, PROMPT, 12)
    stop = expected[4]
    deltas = serve(cluster, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    assert cluster.tokens("r") == expected[: expected.index(stop) + 1]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_token_id == stop


def test_every_token_has_its_logprobs_the_first_included(cluster, hf):
    deltas = serve(cluster, max_tokens=5, logprobs=3)
    tokens = cluster.tokens("r")
    with torch.no_grad():
        logits = hf(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    reference = torch.log_softmax(logits.double(), -1)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert len(entries) == 5
    for entry, token, row in zip(entries, tokens, reference):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [top for top, _ in entry.top] == row.topk(3).indices.tolist()


def test_prompt_logprobs_cover_every_prompt_token(cluster, hf):
    serve(cluster, max_tokens=2)  # a warm cache must not hide positions
    cluster.submit(make_request("p", PROMPT, max_tokens=2, prompt_logprobs=2))
    cluster.run()
    found = cluster.deltas["p"][0].prompt_logprobs
    with torch.no_grad():
        reference = torch.log_softmax(hf(torch.tensor([PROMPT])).logits[0].double(), -1)
    assert len(found) == len(PROMPT) and found[0] is None
    for position in range(1, len(PROMPT)):
        assert found[position].token_id == PROMPT[position]
        assert found[position].logprob == pytest.approx(reference[position - 1][PROMPT[position]].item(), abs=1e-4)


def test_the_next_turn_reuses_what_decode_filled_where_pools_are_shared(cluster):
    deltas = serve(cluster, max_tokens=16)
    assert deltas[0].prefill.num_cached_tokens == 0
    follow_up = PROMPT + cluster.tokens("r") + [9, 9, 9]
    cluster.submit(make_request("next", follow_up))
    cluster.run()
    report = cluster.deltas["next"][0].prefill
    one_pool = cluster.config.topology.channel in ("local", "shm")
    known = len(PROMPT) + 15 if one_pool else len(PROMPT)
    assert report.num_prompt_tokens == len(follow_up)
    if report.where == "remote" or one_pool:
        assert report.num_cached_tokens == known // 4 * 4


def test_only_blocks_that_decode_lacks_travel(cluster):
    if cluster.config.topology.channel != "tcp":
        pytest.skip("one pool: nothing travels")
    first = serve(cluster, max_tokens=4)[0].prefill
    again = PROMPT[:16] + [7] * 14
    cluster.submit(make_request("again", again, max_tokens=4))
    cluster.run()
    second = cluster.deltas["again"][0].prefill
    assert (first.num_blocks_held, first.num_blocks_sent) == (0, 6)
    assert (second.num_blocks_held, second.num_blocks_sent) == (4, 4)
    assert second.num_bytes_sent == 4 * cluster.decode[0].model.block_bytes


def test_a_request_past_its_deadline_fails_and_frees_everything(cluster):
    late = make_request("late", PROMPT, max_tokens=50)
    late.deadline = late.arrival - 1
    cluster.submit(late)
    cluster.run()
    assert cluster.failures["late"].code == "deadline"


def test_an_abort_in_any_phase_leaves_the_pools_whole(cluster):
    for steps in range(12):
        name = f"r{steps}"
        cluster.submit(make_request(name, PROMPT + [steps] * 8, max_tokens=30))
        for _ in range(steps):
            cluster.step()
        cluster.abort(name)
    cluster.run()


def test_prefills_are_counted_where_they_happened(cluster):
    serve(cluster, max_tokens=2)
    cluster.submit(make_request("short", PROMPT[:5], max_tokens=2))
    cluster.run()
    counters = cluster.decode[0].engine.counters
    topology = cluster.config.topology
    limit = topology.local_prefill_max_tokens
    expected = {"unlimited": (2, 0), 0: (0, 2), 9: (1, 1)}[limit]
    assert (counters["local_prefills_total"], counters["remote_prefills_total"]) == expected
    assert cluster.deltas["r"][0].prefill.where == ("local" if limit == "unlimited" else "remote")
    assert cluster.deltas["short"][0].prefill.where == ("remote" if limit == 0 else "local")
