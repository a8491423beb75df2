"""Reading config.json: what each family means, and one clear line for what cannot be used."""

import json
from pathlib import Path

import pytest
import transformers

from engine.models.config import ModelConfig, ModelError
from tests.tiny_models import FAMILIES

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def write(directory: Path, generation: dict | None = None, without: str = "", **values) -> Path:
    content = {key: value for key, value in {**BASE, **values}.items() if key != without}
    (directory / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_is_what_transformers_reads(tiny_model, family):
    theirs = transformers.AutoConfig.from_pretrained(tiny_model(family))
    ours = ModelConfig.from_dir(tiny_model(family))
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.dtype == "float32"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ({}, (False, False, False, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        ({**QWEN3, "attention_bias": True}, (True, True, False, True)),
        ({**MISTRAL, "attention_bias": True}, (False, False, False, False)),
    ],
)
def test_biases_and_query_key_norm_follow_the_family(tmp_path, values, expected):
    config = ModelConfig.from_dir(write(tmp_path, **values))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sliding_window": 16}, (None, None, None)),
        ({**MISTRAL, "sliding_window": 16}, (16, 16, 16)),
        ({**MISTRAL, "sliding_window": None}, (None, None, None)),
        (MISTRAL, (4096, 4096, 4096)),
        ({**QWEN2, "sliding_window": 16}, (None, None, None)),
        ({**QWEN2, "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1}, (None, None, None)),
        ({**QWEN2, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (None, 16, 16)),
        ({**QWEN3, "sliding_window": 16, "use_sliding_window": True}, (None, None, None)),
        (
            {
                **QWEN3,
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (16, None, 16),
        ),
    ],
)
def test_sliding_windows_are_those_of_each_layer(tmp_path, values, expected):
    assert ModelConfig.from_dir(write(tmp_path, **values)).sliding_windows == expected


@pytest.mark.parametrize("values", [QWEN2, QWEN3])
def test_sliding_windows_of_qwen_are_where_transformers_puts_them(tmp_path, values):
    write(tmp_path, **values, sliding_window=8, use_sliding_window=True, max_window_layers=2)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    expected = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert ModelConfig.from_dir(tmp_path).sliding_windows == expected == (None, None, 8)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 7]}, 2, (5, 7)),
        ({"eos_token_id": 5}, 2, (5,)),
        ({"bos_token_id": 1}, 2, (2,)),
        (None, [2, 3], (2, 3)),
        (None, None, ()),
    ],
)
def test_stop_ids_come_from_the_generation_config_first(tmp_path, generation, config, expected):
    assert ModelConfig.from_dir(write(tmp_path, generation, eos_token_id=config)).eos_token_ids == expected


def test_missing_keys_mean_what_they_mean_to_transformers(tmp_path):
    write(tmp_path, **QWEN3, without="max_position_embeddings")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = ModelConfig.from_dir(tmp_path)
    assert ours.head_dim == theirs.head_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "'Qwen3MoeForCausalLM' is not"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not supported"),
        ({"architectures": None, "model_type": "gpt2"}, "architecture 'gpt2' is not supported; supported: Qwen3For"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": "awq"}, "quantization_config must be an object"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope type 'linear' lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor is '4', expected a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for each layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({**QWEN3, "layer_types": ["full_attention"]}, "layer_types names 1 layers of 3"),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
        ({**QWEN3, "layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is ['</s>']"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_that_names_it(tmp_path, values, message):
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dir(write(tmp_path, **values))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ModelError, match=f"lacks '{key}'"):
        ModelConfig.from_dir(write(tmp_path, without=key))


def test_a_directory_that_is_not_there_or_not_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_dir(tmp_path / "nothing")
    with pytest.raises(ModelError, match="has no config.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        ModelConfig.from_dir(tmp_path)
