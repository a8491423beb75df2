"""Floors, checked against figures computed by hand and against parameters as transformers counts them."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.roofline import __main__ as command
from bench.roofline.cost import (
    Decoding,
    Precision,
    Workload,
    body_bytes,
    decode_step,
    floors,
    head_bytes,
    kv_bytes_per_token,
    prefill,
    with_precision,
)
from bench.roofline.devices import GIVEN, Ceilings, measure
from bench.roofline.explain import explain, explain_blocks
from bench.roofline.shape import QWEN3_4B, ShapeError, read_shape

FP16 = Decoding()
H200 = Ceilings("H200", "measured", 4.28e12, 643e12, "float16", 141.0, "")


def test_parameters_are_those_of_transformers_without_norms(tiny_model):
    for family in ("qwen3", "llama"):
        directory = tiny_model(family)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        shape = read_shape(directory)
        body = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)
        assert shape.body_parameters == body
        assert shape.head_parameters == model.get_output_embeddings().weight.numel()
        assert shape.tied


def test_a_token_of_the_4b_shape_has_147456_bytes_of_kv():
    assert kv_bytes_per_token(QWEN3_4B, Precision()) == 147_456
    # int8: 73,728 bytes of values and, for each of 36 x 8 heads, key and value, a scale and a zero of two bytes
    assert kv_bytes_per_token(QWEN3_4B, Precision(kv_bits=8)) == 73_728 + 36 * 8 * 2 * 2 * 2


def test_a_step_of_the_4b_shape_reads_8_gb_in_half_precision_and_2_26_in_int4_with_an_int8_head():
    step = decode_step(QWEN3_4B, FP16, 1, 0)
    assert step.bytes == pytest.approx(8.044e9, rel=0.001)
    assert step.seconds(H200) == pytest.approx(1.88e-3, rel=0.002)
    int4 = with_precision(FP16, weight_bits=4, head_bits=8)
    assert decode_step(QWEN3_4B, int4, 1, 0).bytes == pytest.approx(2.26e9, rel=0.003)
    assert decode_step(QWEN3_4B, int4, 1, 0).seconds(GIVEN["t4"]) == pytest.approx(8.7e-3, rel=0.003)


def test_4096_tokens_of_the_4b_shape_take_34_7_tflop():
    work = prefill(QWEN3_4B, FP16, 4096)
    assert work.flops == pytest.approx(34.7e12, rel=0.002)
    assert work.seconds(H200) == pytest.approx(54e-3, rel=0.005)
    assert work.bound(H200) == "compute"


def test_kv_is_read_by_each_sequence_and_weights_once():
    one, many = decode_step(QWEN3_4B, FP16, 1, 314), decode_step(QWEN3_4B, FP16, 32, 314)
    assert many.bytes - one.bytes == 31 * 314 * 147_456
    assert many.flops == pytest.approx(32 * one.flops)


def test_floors_of_the_three_scenarios_follow_from_their_steps():
    workload = Workload(chat=(100, 40), long=(1000, 8), burst=(60, 21), batch=4)
    chat, long, burst = floors(QWEN3_4B, FP16, workload, H200)
    assert chat.value == pytest.approx(decode_step(QWEN3_4B, FP16, 1, 120).seconds(H200) * 1e3)
    assert long.value == pytest.approx(prefill(QWEN3_4B, FP16, 1000).seconds(H200) * 1e3)
    first = prefill(QWEN3_4B, FP16, 60, 4).seconds(H200)
    steps = 20 * decode_step(QWEN3_4B, FP16, 4, 70.5).seconds(H200)
    assert burst.value == pytest.approx(4 * 21 / (first + steps))


def test_acceptance_divides_the_time_per_token_while_memory_is_the_bound():
    plain, spec = (floors(QWEN3_4B, Decoding(acceptance_length=length), Workload(), H200)[0] for length in (1, 4))
    assert spec.value == pytest.approx(plain.value / 4)
    drafted = floors(QWEN3_4B, Decoding(acceptance_length=4, drafter_gb=1.0), Workload(), H200)[0]
    assert drafted.bytes - spec.bytes == 1e9


def test_explain_changes_one_thing_at_a_time_and_in_the_right_direction():
    now, *rows = explain(QWEN3_4B, FP16, Workload(), GIVEN["t4"])
    by_name = {row.what: row for row in rows}
    assert {
        "weights 8 bits",
        "weights 4 bits",
        "head 8 bits",
        "KV 8 bits",
        "acceptance length 2",
        "burst of 64",
    } <= set(by_name)
    for what in ("weights 4 bits", "head 8 bits", "KV 8 bits", "acceptance length 3"):
        assert by_name[what].chat_ms < now.chat_ms and by_name[what].burst_tokens_per_s > now.burst_tokens_per_s
    assert by_name["burst of 1"].burst_tokens_per_s < now.burst_tokens_per_s < by_name["burst of 64"].burst_tokens_per_s
    assert all(row.long_ms == pytest.approx(now.long_ms) for row in rows)  # compute-bound: no byte saved shows
    assert "weights 8 bits" not in {
        row.what for row in explain(QWEN3_4B, with_precision(FP16, weight_bits=4), Workload(), H200)
    }


def test_blocks_decide_waste_and_what_is_computed_again():
    rows = {row.block_size: row for row in explain_blocks(QWEN3_4B, FP16, Workload(), GIVEN["t4"])}
    assert [rows[size].wasted_tokens for size in (16, 64, 256)] == [7.5, 31.5, 127.5]
    assert [rows[size].recomputed_tokens for size in (16, 64, 256)] == [16, 64, 256]  # 4096: the last block, whole
    # 16 GB - 8.044 GB of weights, over 384 tokens of 147,456 bytes
    assert rows[64].sequences_that_fit == int(
        (16e9 - body_bytes(QWEN3_4B, Precision()) - head_bytes(QWEN3_4B, Precision())) // (384 * 147_456)
    )


def test_measuring_this_machine_gives_plausible_ceilings():
    ceilings = measure("cpu")
    assert ceilings.kind == "measured" and ceilings.dtype == "float32"
    assert 1e8 < ceilings.bytes_per_s < 1e13 and 1e8 < ceilings.flops_per_s < 1e15


def test_the_t4_is_projected_and_said_to_be(tmp_path, capsys):
    path = tmp_path / "t4.json"
    assert command.main(["--device", "t4", "--explain", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "(projected)" in printed and "320 GB/s nominal" in printed and "burst of 64" in printed
    record = json.loads(path.read_text())
    assert record["kind"] == record["facts"]["kind"] == record["ceilings"]["kind"] == "projected"
    assert len(record["floors"]) == 3 and record["explain"] and record["blocks"]


def test_a_speedrun_record_gives_sizes_and_the_share_of_the_floor_reached(tmp_path, capsys, tiny_model):
    sizes = {"chat": (100, 40, 2), "long": (300, 8, 1), "burst": (60, 20, 4)}
    names = ("prompt_tokens", "output_tokens", "requests")
    run = tmp_path / "run.json"
    scenarios = [{"name": name, **dict(zip(names, values))} for name, values in sizes.items()]
    floor = floors(QWEN3_4B, FP16, Workload((100, 40), (300, 8), (60, 20), 4), GIVEN["t4"])
    achieved = {"chat": {"value": floor[0].value * 2}, "burst": {"value": floor[2].value / 4}}
    run.write_text(json.dumps({"scenarios": scenarios, "candidate": achieved}))
    assert command.main(["--device", "t4", "--run", str(run)]) == 0
    shares = [
        line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith(("chat", "long", "burst"))
    ]
    assert shares == ["50.0%", "-", "25.0%"]
    run.write_text("{}")
    assert command.main(["--device", "t4", "--run", str(run)]) == 2
    assert "no record of bench.speedrun" in capsys.readouterr().err


def test_a_configuration_that_is_none_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ShapeError, match="num_attention_heads"):
        read_shape(tmp_path)
