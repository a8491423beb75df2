"""The transfer measurement: sizes and rates that can be worked out by hand, and channels that are not there."""

import json

import pytest

from bench.stats import summarize
from bench.transfer.__main__ import main, parse_arguments
from bench.transfer.measure import Measured, Point
from bench.transfer.report import Result, draw, table


def results() -> list[Result]:
    point = Point(64, 600_000_000, summarize([2.0, 3.0, 4.0]), summarize([0.5]))
    shared = Point(64, 0, summarize([0.2]), summarize([0.1]))
    return [
        Result("cuda_p2p", Measured("cuda_p2p", "cuda", summarize([0.1]), [point]), "", "copy from GPU to GPU", 400.0),
        Result("cuda_ipc", Measured("cuda_ipc", "cuda", summarize([0.1]), [shared]), "", "copy within the GPU", 2000.0),
        Result("nccl", reason="channel 'nccl' needs libnccl.so.2"),
    ]


def test_rates_follow_from_bytes_and_median_and_are_held_against_the_link():
    lines = table(results()).splitlines()
    assert lines[1].split() == "cuda_p2p 64 600.0 3.000 ( 2.00 - 4.00) 200.00 50% 0.500 ( 0.50 - 0.50)".split()
    assert lines[2].split()[:6] == ["cuda_ipc", "64", "0.0", "0.200", "(", "0.20"] and "-" in lines[2].split()
    assert lines[3] == "nccl       not measured: channel 'nccl' needs libnccl.so.2"
    assert results()[0].record()["measured"]["points"][0]["gb_per_s"] == 200.0


def test_plot_names_the_channels(tmp_path):
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(results(), tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "cuda_p2p" in text and "cuda_ipc" in text and "nccl" not in text


def test_shm_and_tcp_are_measured_between_two_processes(tmp_path, capsys):
    record = tmp_path / "record.json"
    command = ["--device", "cpu", "--channels", "shm,tcp", "--blocks", "3,1", "--layers", "1", "--repeats", "2"]
    assert main([*command, "--gap-ms", "0", "--scattered", "--json", str(record)]) == 0
    shm, tcp = json.loads(record.read_text())["results"]
    block_bytes = 2 * 8 * 64 * 128 * 2  # keys and values, heads, tokens, dim, bytes
    assert [(point["num_blocks"], point["num_bytes"]) for point in tcp["measured"]["points"]] == [
        (1, block_bytes),
        (3, 3 * block_bytes),
    ]
    assert [point["num_bytes"] for point in shm["measured"]["points"]] == [0, 0]
    assert all(point["handoff_ms"]["n"] == 2 for point in tcp["measured"]["points"])
    assert "socket of this host" in capsys.readouterr().out


def test_a_channel_that_does_not_work_here_says_why_and_the_command_fails(capsys):
    assert main(["--device", "cpu", "--channels", "cuda_p2p", "--blocks", "1", "--layers", "1"]) == 2
    assert "channel 'cuda_p2p' moves blocks of GPU pools, the pool is on cpu" in capsys.readouterr().out


def test_gpus_are_two():
    with pytest.raises(SystemExit):
        parse_arguments(["--gpus", "0"])
    assert parse_arguments(["--gpus", "1,0"]).gpus == ["1", "0"]
