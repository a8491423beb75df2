"""Which GPU each worker of a host finds first."""

from engine.config import DeploymentConfig
from kv_transfer.choose import Gpus
from router import supervisor


def environments(monkeypatch, number, visible=None, **config) -> list[str | None]:
    monkeypatch.setattr(supervisor, "find_gpus", lambda: Gpus(number, True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    specs = supervisor.worker_specs(DeploymentConfig.model_validate(config), "auto", "model", "127.0.0.1:1")
    return [spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in specs]


PAIR = {"prefill_workers": 1, "channel": "cuda_p2p"}


def test_a_worker_sees_its_own_gpu_first_and_the_others_behind_it(monkeypatch):
    assert environments(monkeypatch, 2, topology=PAIR) == ["0,1", "1,0"]
    assert environments(monkeypatch, 4, topology={**PAIR, "gpus": [2, 1]}) == ["2,0,1,3", "1,0,2,3"]


def test_indices_count_what_is_visible_to_the_router(monkeypatch):
    assert environments(monkeypatch, 2, "5,GPU-3f", topology=PAIR) == ["5,GPU-3f", "GPU-3f,5"]


def test_workers_that_share_a_pool_share_a_gpu(monkeypatch):
    shared = {"prefill_workers": 1, "channel": "cuda_ipc"}
    assert environments(monkeypatch, 2, topology=shared) == ["0,1", "0,1"]


def test_colocated_replicas_take_a_gpu_each_and_a_single_worker_is_left_alone(monkeypatch):
    assert environments(monkeypatch, 2, topology={"decode_workers": 2}) == ["0,1", "1,0"]
    assert environments(monkeypatch, 2) == [None]
    assert environments(monkeypatch, 2, topology={"gpus": [1]}) == ["1,0"]


def test_workers_of_the_cpu_are_left_alone(monkeypatch):
    assert environments(monkeypatch, 2, device="cpu", topology={"decode_workers": 2}) == [None, None]
    assert environments(monkeypatch, 0, topology={"decode_workers": 2}) == [None, None]
