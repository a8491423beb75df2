"""Rope tables of every supported type equal those of transformers, in both spellings of the configuration."""

import json

import pytest
import torch
import transformers

from engine.models.config import ModelConfig
from engine.models.rope import rope_table

POSITIONS = 600
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
TYPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "llama3-own-length": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.8,
        "mscale_all_dim": 1.1,
    },
    "yarn-few-turns": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 30.0,
    },
    "yarn-shrinking": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 512},
}
SPELLINGS = {
    "rope_scaling": lambda parameters: {"rope_theta": 50000.0, "rope_scaling": parameters},
    "rope_parameters": lambda parameters: {"rope_parameters": {"rope_theta": 50000.0, **parameters}},
    "type": lambda parameters: {
        "rope_theta": 50000.0,
        "rope_scaling": {"type" if key == "rope_type" else key: value for key, value in parameters.items()},
    },
}


def reference_table(directory) -> torch.Tensor:
    """Cosines and sines of transformers' own rotary module, `[POSITIONS, 2, head_dim]`."""
    config = transformers.AutoConfig.from_pretrained(directory)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(POSITIONS)[None])
    return torch.stack([cos[0], sin[0]], dim=1)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("rope_type", TYPES)
def test_table_equals_transformers(tmp_path, rope_type, spelling):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **SPELLINGS[spelling](TYPES[rope_type])}))
    expected = reference_table(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    table = rope_table(config.rope, config.head_dim, POSITIONS, torch.device("cpu"))
    half = config.head_dim // 2
    torch.testing.assert_close(table[:, 0], expected[:, 0], atol=1e-4, rtol=0)
    torch.testing.assert_close(table[:, 1, half:], expected[:, 1, half:], atol=1e-4, rtol=0)
    assert torch.equal(table[:, 1, :half], -table[:, 1, half:])
