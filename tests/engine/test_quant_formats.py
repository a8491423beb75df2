"""Published quantized checkpoints: tensors packed here from their formats' descriptions, the service's logits against
transformers on the weights that the integers stand for."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.kv_pool import KVPool
from engine.models.config import ModelError
from engine.quant_formats.readers import PublishedReader
from engine.quantize.scheme import Precision
from engine.runner import ModelRunner, SequenceChunk

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def words(rows: list[list[int]], bits: int = 4) -> torch.Tensor:
    """int32 of lists of 32 / bits unsigned integers, the first in the low bits."""
    values = [sum(number << (bits * place) for place, number in enumerate(row)) for row in rows]
    return torch.tensor([value - (1 << 32) if value >= 1 << 31 else value for value in values], dtype=torch.int32)


def along_columns(codes: torch.Tensor, order=range(8), bits: int = 4) -> torch.Tensor:
    per_word = 32 // bits
    order = list(order)[:per_word]
    table = codes.tolist()
    packed = [words([[row[start + i] for i in order] for start in range(0, len(row), per_word)], bits) for row in table]
    return torch.stack(packed)


def along_rows(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    return along_columns(codes.T, bits=bits).T.contiguous()


def rounded(weight: torch.Tensor, groups: list[int], bits: int, symmetric: bool):
    """codes `[N, K]`, scales and zeros `[N, G]`, and the weight they stand for; group of input k is groups[k]."""
    count, top = max(groups) + 1, (1 << bits) - 1
    codes = torch.empty(weight.shape, dtype=torch.int64)
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count, dtype=torch.int64)
    for group in range(count):
        columns = [k for k, of in enumerate(groups) if of == group]
        part = weight[:, columns]
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        if symmetric:
            scale = part.abs().amax(1) / (top // 2)
            zero = torch.full_like(scale, (top + 1) // 2)
        else:
            scale = (high - low) / top
            zero = (-low / scale).round()
        scale = scale.half().float()
        scales[:, group], zeros[:, group] = scale, zero.long()
        codes[:, columns] = (part / scale[:, None] + zero[:, None]).round().clamp(0, top).long()
    picked = torch.tensor(groups)
    return codes, scales, zeros, (codes - zeros[:, picked]) * scales[:, picked]


def awq(name: str, weight: torch.Tensor):
    codes, scales, zeros, meant = rounded(weight, [k // 32 for k in range(weight.shape[1])], 4, False)
    tensors = {
        "qweight": along_columns(codes.T, AWQ_COLUMNS),
        "qzeros": along_columns(zeros.T, AWQ_COLUMNS),
        "scales": scales.T.half(),
    }
    return tensors, meant


def gptq(name: str, weight: torch.Tensor, act_order: bool, offset: int, bits: int = 4):
    groups = [k // 32 for k in range(weight.shape[1])]
    if act_order:
        random.Random(len(groups)).shuffle(groups)  # the same for all projections of one input
    codes, scales, zeros, meant = rounded(weight, groups, bits, False)
    tensors = {
        "qweight": along_rows(codes.T, bits),
        "qzeros": along_columns((zeros.T - offset) % (1 << bits), bits=bits),
        "scales": scales.T.half(),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return tensors, meant


def packed(name: str, weight: torch.Tensor, symmetric: bool, act_order: bool, channel: bool = False):
    groups = [0 if channel else k // 32 for k in range(weight.shape[1])]
    if act_order:
        random.Random(len(groups)).shuffle(groups)
    codes, scales, zeros, meant = rounded(weight, groups, 4, symmetric)
    tensors = {
        "weight_packed": along_columns(codes),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = along_rows(zeros)
    if act_order:
        tensors["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return tensors, meant


def int8(name: str, weight: torch.Tensor):
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def group_config(activations=None, fmt="pack-quantized", **weights) -> dict:
    described = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": described, "input_activations": activations}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": fmt, **groups}


TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
CASES = {
    "awq": ("qwen3", awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "gptq": ("llama", lambda name, weight: gptq(name, weight, False, 1), {**GPTQ, "desc_act": False}),
    "gptq-act-order": ("qwen2", lambda name, weight: gptq(name, weight, True, 1), {**GPTQ, "desc_act": True}),
    "gptq-v2": ("mistral", lambda name, weight: gptq(name, weight, True, 0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-8bit": ("llama", lambda name, weight: gptq(name, weight, False, 1, 8), {**GPTQ, "bits": 8}),
    "w4a16": ("qwen3", lambda name, weight: packed(name, weight, True, False), group_config()),
    "w4a16-asymmetric-act-order": (
        "llama",
        lambda name, weight: packed(name, weight, False, True),
        group_config(symmetric=False, actorder="group"),
    ),
    "w4a16-channel": (
        "llama",
        lambda name, weight: packed(name, weight, True, False, channel=True),
        group_config(strategy="channel", group_size=None),
    ),
    "w8a16": ("llama", int8, group_config(None, "int-quantized", num_bits=8, strategy="channel")),
    "w8a8": ("qwen2", int8, group_config(TOKEN_INT8, "int-quantized", num_bits=8, strategy="channel")),
}


def write_checkpoint(plain: Path, directory: Path, quantize, config: dict) -> dict[str, torch.Tensor]:
    """A quantized copy of a plain model. Returns the state dict that it stands for."""
    directory.mkdir()
    for path in plain.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
    values = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    tensors, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        if last == "weight" and stem.endswith(PROJECTIONS):
            found, meant[name] = quantize(stem, tensor)
            tensors |= {f"{stem}.{kind}": value.contiguous() for kind, value in found.items()}
        else:
            tensors[name] = meant[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    return meant


def logits_of(directory: Path, prompt: list[int], **options) -> torch.Tensor:
    runner = ModelRunner.load(directory, block_size=16, max_model_len=64, **options)
    runner.use_pool(KVPool.allocate(runner.layout, 4))
    return runner.run([SequenceChunk(prompt, 0, [2, 0, 3, 1], logits="all")])


def reference_logits(plain: Path, meant: dict[str, torch.Tensor], prompt: list[int], int8_inputs: bool) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    model.load_state_dict(meant, strict=False)
    if int8_inputs:
        for name, module in model.named_modules():
            if name.endswith(PROJECTIONS):
                module.register_forward_pre_hook(lambda module, given: (rounded_rows(given[0]),))
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights_that_the_integers_stand_for(case, tiny_model, tmp_path):
    family, quantize, config = CASES[case]
    plain = tiny_model(family, **SIZES)
    meant = write_checkpoint(plain, tmp_path / "model", quantize, config)
    prompt = [random.Random(7).randrange(512) for _ in range(23)]
    ours = logits_of(tmp_path / "model", prompt)
    int8_inputs = case == "w8a8"
    theirs = reference_logits(plain, meant, prompt, int8_inputs)
    if int8_inputs:  # a value in the middle between two steps may go either way
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01
    else:
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    untouched = reference_logits(plain, {}, prompt, False)
    assert (theirs - untouched).abs().max() > 0.01, "the test would not notice if nothing was quantized"


def test_a_conversion_is_kept_in_the_cache_and_the_model_directory_is_left_alone(
    tiny_model, tmp_path, cache, monkeypatch
):
    family, quantize, config = CASES["gptq-act-order"]
    write_checkpoint(tiny_model(family, **SIZES), tmp_path / "model", quantize, config)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir()}
    first = logits_of(tmp_path / "model", [5, 6, 7])
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir()} == before
    assert len(list(cache.rglob("*.safetensors"))) == 8  # four stacked layers in each of two

    def refuse(*_):
        raise AssertionError("converted again")

    monkeypatch.setattr(PublishedReader, "_part", refuse)
    assert torch.equal(logits_of(tmp_path / "model", [5, 6, 7]), first)
    damaged = next(cache.rglob("*.safetensors"))
    damaged.write_bytes(b"damaged")
    monkeypatch.undo()
    monkeypatch.setenv("BATON_CACHE", str(cache))
    assert torch.equal(logits_of(tmp_path / "model", [5, 6, 7]), first)


def test_a_cache_that_cannot_be_written_does_not_matter(tiny_model, tmp_path, cache):
    family, quantize, config = CASES["awq"]
    write_checkpoint(tiny_model(family, **SIZES), tmp_path / "model", quantize, config)
    cache.write_text("a file, not a directory")
    assert torch.isfinite(logits_of(tmp_path / "model", [1, 2])).all()


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
WRONG = [
    ({**AWQ, "quant_method": "exl2"}, "quantization_config.quant_method 'exl2'"),
    ({**AWQ, "bits": 3}, "quantization_config.bits 3"),
    ({**AWQ, "version": "gemv"}, "quantization_config.version 'gemv'"),
    ({**AWQ, "group_size": 48}, "quantization_config.group_size 48"),
    ({**GPTQ, "bits": 2}, "quantization_config.bits 2"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format 'marlin'"),
    ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "quantization_config.dynamic"),
    (group_config(fmt="float-quantized"), "quantization_config.format 'float-quantized'"),
    (group_config(num_bits=2), "config_groups.group_0.weights.num_bits 2"),
    (group_config(type="float"), "config_groups.group_0.weights.type 'float'"),
    (group_config(TOKEN_INT8), "config_groups.group_0.input_activations"),
    (
        group_config({**TOKEN_INT8, "dynamic": False}, "int-quantized", num_bits=8, strategy="channel"),
        "input_activations.dynamic False",
    ),
    ({**group_config(), "config_groups": {"a": {}, "b": {}}}, "config_groups holds 2 groups"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_not_supported_is_refused_in_one_line_that_names_the_field(config, message, tiny_model, tmp_path):
    write_checkpoint(tiny_model("qwen3", **SIZES), tmp_path / "model", awq, config)
    with pytest.raises(ModelError) as caught:
        logits_of(tmp_path / "model", [1])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_tensor_of_the_wrong_shape_or_missing_is_named(tiny_model, tmp_path):
    write_checkpoint(tiny_model("qwen3", **SIZES), tmp_path / "model", awq, AWQ)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj"
    save_file({**tensors, f"{name}.scales": tensors[f"{name}.scales"][:1].contiguous()}, path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj: tensor scales has shape"):
        logits_of(tmp_path / "model", [1])
    del tensors[f"{name}.scales"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match="tensor scales is missing"):
        logits_of(tmp_path / "model", [1])


def test_projections_of_one_input_in_different_orders_are_refused(tiny_model, tmp_path):
    def orders(name, weight):
        shuffled = "k_proj" in name
        return gptq(name, weight, shuffled, 1)

    write_checkpoint(tiny_model("qwen3", **SIZES), tmp_path / "model", orders, GPTQ)
    with pytest.raises(ModelError, match="different orders of inputs"):
        logits_of(tmp_path / "model", [1])


def test_a_quantized_model_is_not_rounded_again(tiny_model, tmp_path):
    write_checkpoint(tiny_model("qwen3", **SIZES), tmp_path / "model", awq, AWQ)
    with pytest.raises(ModelError, match="is quantized already"):
        logits_of(tmp_path / "model", [1], precision=Precision("w4a16"))
