"""ModelRunner: which rows come back, what it tells its peers, what it refuses; and loading of weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.kv_pool import KVPool
from engine.models.config import ModelConfig, ModelError
from engine.runner import ModelRunner, SequenceChunk, resolve_dtype
from engine.weights import load_weights

CPU = torch.device("cpu")
PROMPT = [5, 9, 300, 17, 44, 8]


def load(directory, **options) -> ModelRunner:
    runner = ModelRunner.load(directory, **{"block_size": 4, "max_model_len": 64, **options})
    runner.pool = KVPool.allocate(runner.layout, 16)
    return runner


def logits(runner: ModelRunner) -> torch.Tensor:
    return runner.run([SequenceChunk(PROMPT, 0, [3, 1], "all")])


@pytest.fixture
def copy(tiny_model, tmp_path):
    """A tiny model's directory that the test may damage."""
    return shutil.copytree(tiny_model("qwen3", tie_word_embeddings=False), tmp_path / "model")


def rewrite(directory, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_only_the_rows_asked_for_come_back_in_chunk_order(tiny_model):
    runner = load(tiny_model("llama"))
    everything = logits(runner)
    assert everything.shape == (6, 512)
    assert everything.dtype == torch.float32
    chunks = [
        SequenceChunk(PROMPT[:2], 0, [5, 6], "none"),
        SequenceChunk(PROMPT, 0, [7, 8]),
        SequenceChunk(PROMPT[:3], 0, [9], "all"),
        SequenceChunk(PROMPT[:1], 0, [10]),
    ]
    expected = torch.cat([everything[5:6], everything[:3], everything[:1]])
    torch.testing.assert_close(runner.run(chunks), expected, atol=1e-5, rtol=0)
    assert runner.run(chunks[:1]).shape == (0, 512)


def test_the_pool_may_be_replaced_between_runs(tiny_model):
    runner = load(tiny_model("llama"))
    expected = logits(runner)
    first = runner.pool
    second = KVPool.allocate(runner.layout, 16)
    runner.pool = second
    assert torch.equal(logits(runner), expected)
    assert torch.equal(second.tensor, first.tensor)


def test_more_positions_than_blocks_or_the_limit_allow_are_a_mistake_of_the_caller(tiny_model):
    runner = load(tiny_model("llama"))
    with pytest.raises(AssertionError, match="block table is too short for 6 tokens"):
        runner.run([SequenceChunk(PROMPT, 0, [0])])
    with pytest.raises(AssertionError, match="position 64 is beyond max_model_len 64"):
        runner.run([SequenceChunk([1], 64, list(range(16)) + [0])])
    runner.pool = KVPool.allocate(load(tiny_model("llama"), block_size=8).layout, 16)
    with pytest.raises(AssertionError, match="the pool holds .*block=8"):
        logits(runner)


def test_info_names_what_peers_must_share(tiny_model):
    info = load(tiny_model("mistral")).info("d0")
    assert (info.name, info.dtype, info.block_size, info.vocab_size) == ("d0", "float32", 4, 512)
    assert info.layout == "layers=2,kv=2,heads=2,block=4,dim=24,dtype=float32"
    assert info.block_bytes == 2 * 2 * 2 * 4 * 24 * 4
    assert info.max_model_len == 64
    assert info.eos_token_ids == [2, 0]


def test_the_limit_is_the_models_own_unless_a_smaller_one_is_given(tiny_model):
    assert ModelRunner.load(tiny_model("llama"), block_size=4).info("w").max_model_len == 2048
    with pytest.raises(ModelError, match="max_model_len 4096 exceeds the model's max_position_embeddings, 2048"):
        ModelRunner.load(tiny_model("llama"), block_size=4, max_model_len=4096)


def test_the_fingerprint_tells_models_apart_and_is_the_same_for_a_copy(tiny_model, copy):
    original = load(tiny_model("qwen3", tie_word_embeddings=False)).fingerprint
    assert load(copy).fingerprint == original
    assert load(copy, weights="random").fingerprint not in (original, load(tiny_model("qwen2")).fingerprint)
    rewrite(copy, lambda tensors: tensors.update(extra=torch.zeros(9)))
    assert load(copy).fingerprint != original
    rewrite(copy, lambda tensors: tensors.pop("extra"))
    assert load(copy).fingerprint == original
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert load(copy).fingerprint != original


def test_shards_give_the_logits_of_the_single_file(tiny_model):
    single = tiny_model("qwen2")
    shards = tiny_model("qwen2", max_shard_size="100KB")
    assert not (shards / "model.safetensors").exists()
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(load(shards)), logits(load(single)))


def test_random_weights_need_no_files_and_are_the_same_in_every_process(copy):
    (copy / "model.safetensors").unlink()
    first, second = logits(load(copy, weights="random")), logits(load(copy, weights="random"))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.std() > 0.1


def test_random_weights_have_the_shapes_of_the_files(tiny_model):
    directory = tiny_model("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    config = ModelConfig.from_dir(directory)
    read, drawn = (load_weights(config, directory, origin, torch.float32, CPU) for origin in ("files", "random"))
    for one, other in zip(read.linears(), drawn.linears(), strict=True):
        assert one.weight.shape == other.weight.shape
        assert (one.bias is None) == (other.bias is None)
    assert read.embedding.shape == drawn.embedding.shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(tiny_model, dtype):
    runner = load(tiny_model("qwen3"), dtype=dtype)
    assert runner.pool.tensor.dtype == getattr(torch, dtype)
    expected = logits(load(tiny_model("qwen3")))
    given = logits(runner)
    assert given.dtype == torch.float32
    assert (given - expected).abs().mean() < 0.05 * expected.std()


def test_auto_dtype_is_float32_on_cpu_and_an_unknown_one_is_refused(tiny_model):
    assert load(tiny_model("llama"), dtype="auto").layout.dtype == torch.float32
    with pytest.raises(ModelError, match="dtype 'int8' is not supported; supported: float32, float16, bfloat16"):
        load(tiny_model("llama"), dtype="int8")


def test_a_missing_tensor_is_named(copy):
    rewrite(copy, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(ModelError, match="has no tensor 'model.layers.1.self_attn.q_norm.weight'"):
        load(copy)


def test_an_untied_head_must_be_there(copy):
    rewrite(copy, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match="has no tensor 'lm_head.weight'"):
        load(copy)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy):
    rewrite(copy, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(95, 64)}))
    with pytest.raises(
        ModelError, match=r"'model.layers.0.mlp.up_proj.weight' has shape \[95, 64\], expected \[96, 64\]"
    ):
        load(copy)


def test_a_file_that_is_not_safetensors_is_refused(copy):
    (copy / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ModelError, match="model.safetensors is not a readable safetensors file"):
        load(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only safetensors weights are read"):
        load(copy)


def test_a_missing_shard_or_a_broken_index_is_named(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model("qwen2", max_shard_size="100KB"), tmp_path / "model")
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {shard.name}, which model.safetensors.index.json names"):
        load(directory)
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable safetensors index"):
        load(directory)


def test_every_refusal_is_one_line(copy):
    (copy / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ModelError) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


def test_auto_keeps_the_checkpoints_dtype_but_where_a_gpu_lacks_it(tiny_model, monkeypatch):
    config = replace(ModelConfig.from_dir(tiny_model("qwen3")), dtype="bfloat16")
    capability = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])
    assert resolve_dtype("auto", config, "cpu") == torch.float32
    assert resolve_dtype("auto", config, "cuda") == torch.float16
    assert resolve_dtype("bfloat16", config, "cuda") == torch.bfloat16  # asked for by name
    capability[0] = (8, 0)
    assert resolve_dtype("auto", config, "cuda") == torch.bfloat16
    assert resolve_dtype("auto", replace(config, dtype="float16"), "cuda") == torch.float16
