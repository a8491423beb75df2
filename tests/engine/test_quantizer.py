"""The quantizer: what each method promises, the directory it writes, going on after an interruption, and the floor."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.config import ModelSection
from engine.kernels.quantized_linear import dequantize
from engine.kv_pool import KVPool
from engine.models.config import ModelConfig, ModelError
from engine.quantize import floor
from engine.quantize.__main__ import main
from engine.quantize.calibration import CALIBRATION_TEXT, HELD_OUT_TEXT, load_tokenizer, samples
from engine.quantize.forward import STAGES, Forward, model_logits
from engine.quantize.gptq import gptq_weight
from engine.quantize.layerwise import LayerwiseQuantizer
from engine.quantize.rounding import round_weight
from engine.quantize.scaling import scale_layer
from engine.quantize.scheme import Precision
from engine.runner import ModelRunner, SequenceChunk, fingerprint
from engine.weights import Checkpoint, WeightsBuilder, load_weights

CPU = torch.device("cpu")
PROMPT = [17, 300, 4, 99, 256, 31, 500, 8, 77]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)


def tokens_of(model_dir: Path, count: int = 4) -> torch.Tensor:
    return samples(load_tokenizer(model_dir), num_tokens=64, most=count)


def quantize(model_dir: Path, out: Path, precision: Precision, method: str = "rtn", report=lambda text: None):
    return LayerwiseQuantizer(model_dir, out, precision, method, tokens_of(model_dir), CPU, report).run()


def logits_of(directory: Path, **options) -> torch.Tensor:
    runner = ModelRunner.load(directory, block_size=16, max_model_len=32, **options)
    runner.use_pool(KVPool.allocate(runner.layout, 2))
    return runner.run([SequenceChunk(PROMPT, 0, [1, 0], logits="all")])


@pytest.mark.parametrize(("scheme", "worst"), [("w4a16", 0.12), ("w8a16", 0.008), ("w8a8", 0.012)])
def test_rounding_is_to_the_nearest_of_as_many_steps_as_there_are_bits(scheme, worst):
    weight = torch.randn(24, 200)
    off = dequantize(round_weight(weight, scheme)) - weight
    assert 0 < float(off.norm() / weight.norm()) < worst


def test_weights_of_a_grid_survive_rounding():
    """Sixteen steps from -0.75 to 3 with a scale that float16 holds: nothing to lose."""
    weight = torch.randint(0, 16, (6, 256)).float()
    weight[:, ::128], weight[:, 1::128] = 0.0, 15.0
    weight = (weight - 3) * 0.25
    torch.testing.assert_close(dequantize(round_weight(weight, "w4a16")), weight)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w8a8"])
def test_gptq_leaves_less_error_in_the_products_than_rounding(scheme):
    """On inputs that go together, as those of a language model do."""
    x = torch.randn(512, 12) @ torch.randn(12, 160) + 0.1 * torch.randn(512, 160)
    weight = torch.randn(32, 160)
    expected = x @ weight.T
    errors = [
        float((x @ dequantize(layer).T - expected).norm())
        for layer in (gptq_weight(weight, x.T @ x, scheme), round_weight(weight, scheme))
    ]
    assert errors[0] < 0.7 * errors[1]


def test_gptq_of_independent_inputs_is_rounding():
    """Nothing can be made up for when no input says anything about another."""
    weight = torch.randn(16, 128)
    quantized = gptq_weight(weight, torch.eye(128), "w4a16")
    assert torch.equal(quantized.codes, round_weight(weight, "w4a16").codes)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_scaling_changes_the_weights_and_not_the_function(family, scheme, tiny_model):
    directory = tiny_model(family)
    config = ModelConfig.from_dir(directory)
    builder = WeightsBuilder(config, Checkpoint(directory), torch.float32, CPU)
    layer = builder.layer("model.layers.0")
    hidden = torch.randn(2, 20, config.hidden_size) * torch.logspace(-1, 1, config.hidden_size)
    forward = Forward(config, 20, CPU)
    expected = forward.layer(hidden, layer)
    before = {stage: getattr(layer, stage).weight.clone() for stage in STAGES}
    inputs = {stage: forward.input_of(stage, hidden, layer) for stage in STAGES}
    scale_layer(config, layer, inputs, dict.fromkeys(STAGES, scheme))
    torch.testing.assert_close(forward.layer(hidden, layer), expected, atol=1e-3, rtol=1e-3)
    assert any(not torch.equal(getattr(layer, stage).weight, before[stage]) for stage in STAGES)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_the_forward_pass_of_the_quantizer_is_that_of_transformers(family, tiny_model):
    directory = tiny_model(family)
    config = ModelConfig.from_dir(directory)
    weights = load_weights(config, directory, "files", torch.float32, CPU)
    rows = torch.randint(0, 512, (3, 40))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(rows).logits
        ours = torch.stack(list(model_logits(config, weights, rows, batch=2)))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("method", ["rtn", "awq+gptq"])
def test_the_written_directory_is_served_as_the_weights_its_codes_stand_for(family, method, tiny_model, tmp_path):
    plain, out = tiny_model(family), tmp_path / "out"
    report = quantize(plain, out, Precision("mixed", "int8", "int8"), method)
    assert len(report["errors"]) == 2 and all(0 < row[stage] < 0.2 for row in report["errors"] for stage in STAGES)
    config = ModelConfig.from_dir(out)
    weights = load_weights(config, out, "files", torch.float32, CPU)
    state = {
        "model.embed_tokens.weight": weights.embedding.codes.float() * weights.embedding.scales[:, None],
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": dequantize(weights.head),
    }
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}"
        state[f"{at}.input_layernorm.weight"], state[f"{at}.post_attention_layernorm.weight"] = (
            layer.input_norm,
            layer.mlp_norm,
        )
        if layer.query_norm is not None:
            state[f"{at}.self_attn.q_norm.weight"] = layer.query_norm
            state[f"{at}.self_attn.k_norm.weight"] = layer.key_norm
        for kind, stacked in (("weight", dequantize(layer.qkv)), ("bias", layer.qkv.bias)):
            if stacked is not None:
                parts = stacked.split([query, key_value, key_value])
                state |= {f"{at}.self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts)}
        state[f"{at}.self_attn.o_proj.weight"] = dequantize(layer.attention_out)
        gate, up = dequantize(layer.gate_up).chunk(2)
        state |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
        state[f"{at}.mlp.down_proj.weight"] = dequantize(layer.down)
    assert {layer.down.scheme for layer in weights.layers} == {"w8a16"}
    assert {layer.qkv.scheme for layer in weights.layers} == {"w4a16"}
    values = json.loads((plain / "config.json").read_text())
    untied = transformers.AutoConfig.for_model(**{**values, "tie_word_embeddings": False})
    model = transformers.AutoModelForCausalLM.from_config(untied, dtype=torch.float32).eval()
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(out), expected, atol=2e-3, rtol=1e-3)


def test_rounding_at_load_gives_what_the_quantizer_writes(tiny_model, tmp_path):
    plain = tiny_model("qwen3")
    precision = Precision("w4a16", "int4", "int8")
    quantize(plain, tmp_path / "out", precision)
    first = logits_of(plain, precision=precision)
    torch.testing.assert_close(first, logits_of(tmp_path / "out"), atol=1e-4, rtol=0)
    assert torch.equal(logits_of(plain, precision=precision), first)  # from the cache
    assert not torch.allclose(first, logits_of(plain), atol=0.01)
    assert fingerprint(plain, "files", precision) != fingerprint(plain, "files")


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(tiny_model, tmp_path):
    plain, precision = tiny_model("qwen3"), Precision("w4a16", "int8")

    class Interrupted(Exception):
        pass

    def interrupt(text: str) -> None:
        if text.startswith("layer 1 "):
            raise Interrupted

    with pytest.raises(Interrupted):
        quantize(plain, tmp_path / "cut", precision, "awq+gptq", interrupt)
    assert not (tmp_path / "cut" / "config.json").exists(), "an unfinished directory must not look like a model"
    kept = (tmp_path / "cut" / "layer-000.safetensors").stat().st_mtime_ns
    with pytest.raises(ModelError, match="other settings"):
        quantize(plain, tmp_path / "cut", precision, "rtn")
    quantize(plain, tmp_path / "cut", precision, "awq+gptq")
    quantize(plain, tmp_path / "whole", precision, "awq+gptq")
    assert (tmp_path / "cut" / "layer-000.safetensors").stat().st_mtime_ns == kept
    for path in (tmp_path / "whole").glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(tmp_path / "cut" / path.name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_command_says_in_one_line_what_is_wrong_and_fails(tiny_model, tmp_path, capsys):
    plain, out = tiny_model("qwen3"), tmp_path / "out"
    assert main([str(plain), "--scheme", "w8a8", "--out", str(out), "--method", "rtn", "--sample-tokens", "64"]) == 0
    capsys.readouterr()
    for arguments, message in (
        ([str(out), "--out", str(tmp_path / "again")], "is quantized already"),
        ([str(tmp_path / "nothing"), "--out", str(tmp_path / "again")], "no tokenizer.json"),
        ([str(plain), "--out", str(tmp_path)], "is not empty"),
        ([str(plain), "--out", str(tmp_path / "x"), "--sample-tokens", "10000000"], "less than one sample"),
    ):
        assert main([*arguments, "--scheme", "w4a16"]) == 1
        said = capsys.readouterr().err.strip().splitlines()
        assert message in said[-1] and said[-1].startswith("quantize: ")


def test_calibration_and_held_out_text_share_no_line():
    lines = [set(path.read_text().splitlines()) - {"", "}"} for path in (CALIBRATION_TEXT, HELD_OUT_TEXT)]
    shared = {line for line in lines[0] & lines[1] if len(line) > 20}
    assert not shared and len(lines[0]) > 150


def write_table(path: Path, **rises: float) -> Path:
    rows = [
        {"scheme": scheme, "method": "rtn", "head": "full", "perplexity_rise": rise, "agreement": 0.99}
        for scheme, rise in rises.items()
    ]
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_auto_takes_the_smallest_scheme_above_the_floor(tmp_path):
    table = tmp_path / "table.json"
    assert floor.best_scheme(write_table(table, w4a16=0.05, mixed=0.01, w8a16=0.0)) == "w4a16"
    assert floor.best_scheme(write_table(table, w4a16=0.07, mixed=0.06, w8a16=0.0)) == "mixed"
    assert floor.best_scheme(write_table(table, w4a16=0.07, mixed=0.061, w8a16=0.0)) == "w8a16"
    assert floor.best_scheme(write_table(table, w4a16=0.07)) == "none"
    assert floor.best_scheme(tmp_path / "missing.json") == "none"


def test_auto_leaves_a_cpu_and_a_quantized_model_alone(tiny_model, tmp_path):
    plain = tiny_model("qwen3")
    assert floor.choose_precision(str(plain), ModelSection(quantization="auto"), "cpu").scheme == "none"
    assert floor.choose_precision(str(plain), ModelSection(quantization="w4a16"), "cpu").scheme == "w4a16"
    quantize(plain, tmp_path / "out", Precision("w8a16"))
    assert floor.choose_precision(str(tmp_path / "out"), ModelSection(quantization="auto"), "cuda").scheme == "none"


def test_the_shipped_table_says_of_each_scheme_whether_it_passes_its_own_floor():
    table = json.loads(floor.TABLE.read_text())
    assert {row["scheme"] for row in table["rows"]} >= {"w4a16", "mixed", "w8a16", "w8a8"}
    for row in table["rows"]:
        below = (
            row["perplexity_rise"] > table["floor"]["perplexity_rise"] or row["agreement"] < table["floor"]["agreement"]
        )
        assert row["passes"] is not below
