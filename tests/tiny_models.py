"""Tiny random models of every family as Hugging Face directories, made by transformers itself, for tests."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = [
    "A relay race is won or lost where the baton changes hands, not on the straight.",
    "The first runner carries the whole prompt, the second runner carries every token that follows it.",
    "def add(left, right):\n    total = left + right\n    return total\n",
    "for index in range(128):\n    print(index, values[index], sep=', ')\n",
    '{"name": "read_file", "arguments": {"path": "engine/request.py", "offset": 0}}',
    "You are a helpful assistant. Answer the question, then say how certain you are of the answer.",
    "Where did the time go? Prefill computes, decode waits for memory; both read the same blocks of the same pool.",
    "import os\nimport sys\nfrom pathlib import Path\n\n"
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "Grüße aus Köln, naïve café, emoji 😀 and 日本語 keep the tokenizer honest about bytes.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 64 128 256 512 1024 2048 4096",
    "system\nuser\nassistant\ntool\nThe tests passed, the lint failed, so the change was not merged until the morning.",
    "Once the weather turned, the harbour emptied and the boats stayed under their covers until spring came back.",
]

FAMILY_CONFIG: dict[str, dict] = {
    "qwen3": {"head_dim": 24},
    "qwen2": {},
    "llama": {"head_dim": None},
    "mistral": {"head_dim": 24, "sliding_window": None},
}


def make_tiny_model(
    directory: str | Path, family: str, *, seed: int = 0, max_shard_size: str | None = None, **overrides
) -> Path:
    """Write a random float32 model of `family` (one of FAMILIES), its tokenizer and its chat template to `directory`.

    `overrides` are keywords of the family's transformers config. `max_shard_size` (such as "100KB") splits the weights.
    The same arguments give the same weights. Returns `directory` as a Path.
    """
    import transformers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    values = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": family in ("qwen3", "llama"),
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|pad|>"],
        **FAMILY_CONFIG[family],
        **overrides,
    }
    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(directory, **shards)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return directory


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random weights whose logits are far from uniform and whose every part (norm weights, biases) matters.

    Projections back to the residual stream are drawn larger than the embedding, so that what the next token is depends
    on the whole context and not on the last token alone.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("q_norm.weight"):
                parameter.copy_(2 + 0.4 * noise)
            elif name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)
            else:
                gain = 4.0 if "o_proj" in name or "down_proj" in name else 1.3
                parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens, trained on TRAINING_TEXT (deterministic)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer
