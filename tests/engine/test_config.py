"""Deployment files: what is accepted, what is refused, and that the refusal says where and why."""

import pytest

from engine.config import CONFIG_DIR, ConfigError, DeploymentConfig, load_config


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid_and_says_what_it_is_for(path):
    assert load_config(path.stem) == load_config(str(path))
    assert load_config(path.stem).description


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("kv: {blok_size: 16}", "kv.blok_size", "Extra inputs"),
        ("decode: {max_running: 0}", "decode.max_running", "greater than or equal to 1"),
        ("topology: {channel: pigeon}", "topology.channel", "'auto', 'shm'"),
        ("topology: {prefill_workers: 1}", "topology", "set prefill_workers: 0"),
        ("topology: {channel: tcp}", "topology", "at least one prefill worker"),
        ("topology: {local_prefill_max_tokens: 9}", "topology", "colocated"),
        ("topology: {prefill_workers: 2, channel: shm}", "topology", "exactly one prefill worker"),
        ("{device: cuda, topology: {prefill_workers: 1, channel: shm}}", "top level", "set device: cpu"),
        ("{device: cpu, topology: {prefill_workers: 1, channel: nccl}}", "top level", "set device: cuda"),
        ("topology: {prefill_workers: 2, channel: cuda_ipc}", "topology", "exactly one prefill worker"),
        ("topology: {prefill_workers: 1, channel: tcp, gpus: [0]}", "topology", "an index for each of the 2 workers"),
        ("topology: {prefill_workers: 1, channel: cuda_ipc, gpus: [0, 1]}", "topology", "gpus [0, 1] are several"),
        ("transfer: {lease_s: 1, heartbeat_s: 1}", "transfer", "at least twice heartbeat_s"),
        ("kv: [", "", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_the_key(tmp_path, text, place, reason):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_config(str(path))
    message = str(refusal.value)
    assert "\n" not in message and str(path) in message and place in message and reason in message


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="disagg-cpu-shm"):
        load_config("no-such-deployment")


def test_auto_takes_the_gpu_only_where_the_channel_reaches_it():
    colocated = DeploymentConfig()
    over_tcp = DeploymentConfig.model_validate({"topology": {"prefill_workers": 1, "channel": "tcp"}})
    in_memory = DeploymentConfig.model_validate({"topology": {"prefill_workers": 1, "channel": "shm"}})
    assert (colocated.choose_device(True), colocated.choose_device(False)) == ("cuda", "cpu")
    assert (over_tcp.choose_device(True), in_memory.choose_device(True)) == ("cuda", "cpu")


def test_workers_take_gpus_in_turn_unless_the_configuration_places_them():
    def placed(**topology):
        return DeploymentConfig.model_validate({"topology": {"prefill_workers": 1, "decode_workers": 2, **topology}})

    assert placed(channel="cuda_p2p").worker_gpus(2) == [0, 1, 0]
    assert placed(channel="cuda_ipc").worker_gpus(2) == [0, 0, 0]
    assert placed(channel="nccl", gpus=[2, 0, 1]).worker_gpus(3) == [2, 0, 1]
    with pytest.raises(ConfigError, match="names GPU 2, this host has 2"):
        placed(channel="nccl", gpus=[2, 0, 1]).worker_gpus(2)
