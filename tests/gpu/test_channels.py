"""Channels on GPUs: what the device may do out of order, real processes, tokens. Needs one CUDA device, better two.

Together with the suite that every channel passes:

    python3 -m pytest tests/kv_transfer tests/gpu/test_channels.py -k "cuda or nccl or gpu"
"""

import os
import random
import signal
import threading

import pytest
import torch

from kv_transfer.channel import ChannelError
from kv_transfer.channels import get_channel
from kv_transfer.handoff import GrantBlocks, PrefillFailed, ReturnBlocks
from tests.cluster import TOPOLOGIES, Cluster, make_config, make_request
from tests.kv_transfer.channels import needs_gpus
from tests.kv_transfer.joined import LAYOUT, Joined, make_handoff, wait_true
from tests.server import Server, write_config
from tests.test_service import pools_whole, wait_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPIN_CYCLES = 200_000_000  # about a tenth of a second
SPLIT = [*needs_gpus(["cuda_p2p", "tcp-gpu"], 1), *needs_gpus(["nccl"], 2)]
CHANNELS = [*needs_gpus(["cuda_ipc", "cuda_p2p", "tcp"], 1), *needs_gpus(["nccl"], 2)]


@pytest.fixture
def joined(request):
    joined = Joined(request.param)
    yield joined
    torch.cuda.synchronize()
    joined.close()


def busy_then_fill(tensor, value):
    """Work under way: the device writes `value` when it has spun for a while."""
    with torch.cuda.device(tensor.device):
        torch.cuda._sleep(SPIN_CYCLES)
        tensor.fill_(value)


def read_elsewhere(tensor) -> float:
    """The first value, read on a stream that waits for nothing, as another process's stream does."""
    with torch.cuda.device(tensor.device), torch.cuda.stream(torch.cuda.Stream()):
        return float(tensor.flatten()[0].cpu())


@pytest.mark.parametrize("joined", ["cuda_ipc"], indirect=True)
def test_returned_blocks_come_out_when_the_step_that_writes_them_is_over(joined):
    busy_then_fill(joined.decode_pool.tensor[3], 7.0)
    joined.decode.send(ReturnBlocks([3]))
    assert joined.wait_prefill(1) == [ReturnBlocks([3])]
    assert read_elsewhere(joined.prefill_pool.tensor[3]) == 7.0


@pytest.mark.parametrize("joined", ["cuda_ipc"], indirect=True)
@pytest.mark.parametrize("message", [GrantBlocks([3]), make_handoff(("r", 0), num_blocks=1)], ids=["grant", "handoff"])
def test_blocks_given_to_decode_come_out_when_the_step_that_writes_them_is_over(joined, message):
    busy_then_fill(joined.prefill_pool.tensor[3], 7.0)
    joined.prefill.send(message)
    assert joined.wait_decode(1) == [message]
    assert read_elsewhere(joined.decode_pool.tensor[3]) == 7.0


@pytest.mark.parametrize("joined", ["cuda_ipc"], indirect=True)
def test_a_decode_end_that_closes_waits_for_its_step(joined):
    busy_then_fill(joined.decode_pool.tensor[3], 7.0)
    joined.decode.close()
    assert read_elsewhere(joined.prefill_pool.tensor[3]) == 7.0


@pytest.mark.parametrize("joined", SPLIT, indirect=True)
def test_blocks_arrive_behind_the_step_that_still_writes_their_place(joined):
    """The step launched ahead for the sequence that had the places before."""
    key, block_ids = ("r", 0), list(range(20))
    written = joined.fill(block_ids)
    table = joined.destination(block_ids)
    for place in table:
        joined.decode_pool.tensor[place].zero_()
    busy_then_fill(joined.decode_pool.tensor[table[0]], -1.0)
    busy_then_fill(joined.decode_pool.tensor[table[19]], -1.0)
    joined.decode.expect(key, table)
    joined.prefill.send_blocks(key, 0, block_ids)
    joined.prefill.send(make_handoff(key, num_blocks=20))
    joined.wait_decode(1)
    torch.cuda.synchronize(joined.decode_pool.tensor.device)
    for block_id, place in zip(block_ids, table, strict=True):
        assert torch.equal(joined.decode_pool.tensor[place].cpu(), written[block_id])


@pytest.mark.parametrize("joined", SPLIT, indirect=True)
def test_forgotten_blocks_can_be_written_at_once(joined):
    """forget returns; what is launched then is not overwritten by the transfer."""
    block_ids = list(range(60))
    joined.fill(block_ids)
    table = joined.destination(block_ids)
    for key in [("r", number) for number in range(20)]:
        joined.decode.expect(key, table)
        joined.prefill.send_blocks(key, 0, block_ids)
        joined.decode.forget(key)
        joined.decode_pool.tensor[table] = 3.0
        joined.prefill.abandon(key)
        wait_true(lambda key=key: not joined.prefill.is_moving(key))
        assert bool((joined.decode_pool.tensor[table] == 3.0).all())


@pytest.mark.parametrize("joined", SPLIT, indirect=True)
def test_blocks_scattered_in_both_pools_arrive_where_they_belong(joined):
    rng = random.Random(4)
    for number in range(10):
        key, block_ids = (f"r{number}", 0), rng.sample(range(64), 40)
        written = joined.fill(block_ids, seed=number)
        table = rng.sample(range(64), 40)
        joined.decode.expect(key, table)
        joined.prefill.send_blocks(key, 0, block_ids)
        joined.prefill.send(make_handoff(key, num_blocks=40))
        joined.wait_decode(1)
        for block_id, place in zip(block_ids, table, strict=True):
            assert torch.equal(joined.decode_pool.tensor[place].cpu(), written[block_id])


@pytest.mark.parametrize("joined", ["cuda_p2p"], indirect=True)
def test_a_prefill_end_that_leaves_in_the_middle_of_a_transfer_completes_nothing(joined):
    key, block_ids = ("r", 0), list(range(8))
    joined.fill(block_ids)
    busy_then_fill(joined.decode_pool.tensor[joined.destination([0])[0]], 0.0)
    joined.decode.expect(key, joined.destination(block_ids))  # the copies wait for the spinning device
    joined.prefill.send_blocks(key, 0, block_ids)
    joined.prefill.send(make_handoff(key, num_blocks=8))
    joined.prefill.send(GrantBlocks([1]))
    assert joined.wait_decode(1) == [GrantBlocks([1])]
    joined.prefill.close()
    assert joined.prefill.is_moving(key)  # the other side has to notice first
    torch.cuda.synchronize(joined.decode_pool.tensor.device)
    joined.decode.close()
    wait_true(lambda: not joined.prefill.is_moving(key))
    assert not [message for message in joined.decode._inbox._messages if not isinstance(message, PrefillFailed)]


def test_pools_of_the_cpu_are_refused():
    for name in ("cuda_ipc", "cuda_p2p", "nccl"):
        with pytest.raises(ChannelError, match=f"channel '{name}' moves blocks of GPU pools, the pool is on cpu"):
            get_channel(name).make_pool(LAYOUT, 2, "cpu")


def test_a_described_pool_that_is_gone_is_refused():
    from kv_transfer.channels.gpu_memory import MappedPool, export_pool

    description = export_pool("cuda_p2p", get_channel("cuda_p2p").make_pool(LAYOUT, 2, "cuda"))
    with pytest.raises(ChannelError, match="the pool that was described is gone"):
        MappedPool("cuda_p2p", description, 0)
    with pytest.raises(ChannelError, match="cannot map the prefill worker's pool"):
        MappedPool("cuda_p2p", {**description, "process": "another", "handle": "00" * 64}, 0)


# engines and processes


def gpu_config(channel: str, **more):
    topology = {"prefill_workers": 1, "channel": channel, "local_prefill_max_tokens": more.pop("local", 0)}
    TOPOLOGIES.setdefault(f"{channel}-gpu", topology)
    options = {"device": "cuda", "dtype": "float16", "block_size": 16, "pool_tokens": 4096, "max_model_len": 256}
    return make_config(f"{channel}-gpu", deterministic=True, overlap=True, **options, **more)


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(5)
    shared = [rng.randrange(4, 500) for _ in range(70)]
    prompts = [
        shared[: rng.randrange(20, 70)] + [rng.randrange(4, 500) for _ in range(rng.randrange(40))] for _ in range(12)
    ]
    return [make_request(f"r{i}", prompt, max_tokens=rng.randrange(1, 24)) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(tiny_model, requests):
    """The tokens of a colocated GPU worker."""
    options = {"device": "cuda", "dtype": "float16", "block_size": 16, "pool_tokens": 4096, "max_model_len": 256}
    cluster = Cluster(str(tiny_model("qwen3")), make_config(deterministic=True, overlap=True, **options))
    try:
        for request in requests:
            cluster.submit(request)
        cluster.run()
        return {request.request_id: cluster.tokens(request.request_id) for request in requests}
    finally:
        cluster.close()


@pytest.mark.parametrize("channel", needs_gpus(["cuda_ipc", "cuda_p2p", "tcp"], 1))
def test_engines_over_the_channel_give_the_tokens_of_colocated(tiny_model, requests, expected, channel):
    """Both engines in this process, on one GPU, small pools."""
    cluster = Cluster(str(tiny_model("qwen3")), gpu_config(channel))
    try:
        rng = random.Random(6)
        for request in requests:
            cluster.submit(request)
            for _ in range(rng.randrange(4)):
                cluster.step()
        cluster.run()
        assert {request.request_id: cluster.tokens(request.request_id) for request in requests} == expected
        cluster.step_until(lambda: not any(cache.counts().leased for cache in cluster.caches))
        cluster.check_whole()
    finally:
        cluster.close()


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_service_gives_the_tokens_of_colocated_and_outlives_each_worker(
    tiny_model, requests, expected, tmp_path, channel
):
    config = write_config(
        tmp_path,
        "shm",
        device="cuda",
        deterministic=True,
        kv={"block_size": 16, "pool_tokens": 4096},
        model={"dtype": "float16", "max_model_len": 256},
        topology={"prefill_workers": 1, "channel": channel, "local_prefill_max_tokens": 0},
        decode={"max_running": 8},
    )
    with Server(config, tiny_model("qwen3"), tmp_path / "log") as server:

        def ask_all():
            answers: dict[str, list[int]] = {}

            def ask(request):
                answer = server.complete(
                    request.prompt_token_ids, max_tokens=request.sampling.max_tokens, temperature=0, ignore_eos=True
                )
                answers[request.request_id] = answer["choices"][0]["token_ids"]

            threads = [threading.Thread(target=ask, args=(request,)) for request in requests]
            for thread in threads:
                thread.start()
            return threads, answers

        for victim in (None, "prefill", "decode"):
            threads, answers = ask_all()
            if victim is not None:
                [pid] = server.worker_pids(victim)
                os.kill(pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
            for name, tokens in expected.items():
                assert answers[name][: len(tokens)] == tokens, (victim, name)
            server.wait_healthy()
        wait_for(lambda: pools_whole(server))


def test_a_pool_on_another_gpu_is_refused_by_cuda_ipc():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    channel = get_channel("cuda_ipc")
    pool = channel.make_pool(LAYOUT, 2, "cuda:1")
    with pytest.raises(ChannelError, match="shares a pool on one GPU, but the prefill worker is on GPU"):
        channel.open_pool(channel.describe(pool))
