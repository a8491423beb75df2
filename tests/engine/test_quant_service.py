"""A model that is rounded as it is loaded, served over HTTP from its own processes."""

import httpx
import torch
import transformers

from engine.kernels.quantized_linear import dequantize
from engine.quantize.rounding import round_weight
from tests.server import Server, write_config

PROMPT = [17, 300, 4, 99, 256, 31, 500, 8, 77]


def test_greedy_tokens_over_http_are_those_of_the_rounded_weights(tiny_model, tmp_path):
    directory = tiny_model("llama", head_dim=16, intermediate_size=128)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.weight.copy_(dequantize(round_weight(module.weight, "w4a16")))
        ids = list(PROMPT)
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    section = {"dtype": "float32", "max_model_len": 512, "quantization": "w4a16"}
    config = write_config(tmp_path, "colocated", device="cpu", model=section)
    with Server(config, directory, tmp_path / "log", BATON_CACHE=str(tmp_path / "cache")) as server:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == ids[len(PROMPT) :]
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 8
