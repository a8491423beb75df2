"""The configuration of one deployment: one YAML file, one model. Unknown keys are errors."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"

ChannelName = Literal["local", "auto", "shm", "cuda_ipc", "cuda_p2p", "nccl", "tcp", "nixl"]
SHARED_POOL_CHANNELS = ("shm", "cuda_ipc")
CPU_CHANNELS = ("shm",)
GPU_CHANNELS = ("cuda_ipc", "cuda_p2p", "nccl")

CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 512, 8192
CPU_MAX_RUNNING, GPU_MAX_RUNNING = 32, 128


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which value is wrong and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    dir: str | None = Field(None, description="Hugging Face model directory; the MODEL_DIR variable wins over it")
    weights: Literal["files", "random"] = Field("files", description="random: the same shapes without weight files")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="auto: float32 on CPU, else the checkpoint's, float16 on GPUs without bfloat16"
    )
    max_model_len: int | None = Field(None, ge=2, description="tokens in prompt plus output; default: the model's own")
    quantization: Literal["none", "auto", "w4a16", "w8a16", "w8a8", "mixed"] = Field(
        "none",
        description="what the weights of an unquantized model are rounded to as they are loaded; a quantized model "
        "stays as it is. auto: on a GPU the smallest scheme above the quality floor (docs/quantization.md)",
    )
    head_precision: Literal["full", "int8", "int4"] = Field(
        "full", description="the same for the output head of an unquantized model"
    )
    embedding_precision: Literal["full", "int8"] = Field("full", description="the same for its embedding")


class KVSection(Section):
    block_size: int = Field(64, ge=1, description="tokens in a KV block")
    gpu_memory_share: float = Field(
        0.9, gt=0, le=1, description="part of a GPU's memory for weights, recorded graphs, activations and the KV pool"
    )
    pool_tokens: int | None = Field(
        None, ge=2, description="tokens a worker's KV pool holds; default: from free memory"
    )
    prefix_cache: bool = Field(True, description="reuse the KV of prompt prefixes already computed")


class TopologySection(Section):
    prefill_workers: int = Field(0, ge=0, description="0: colocated, decode workers prefill every prompt themselves")
    decode_workers: int = Field(1, ge=1, description="each runs a batch of its own")
    channel: ChannelName = Field(
        "local", description="how KV blocks reach decode workers; auto: the best for where this host's workers are"
    )
    gpus: list[int] | None = Field(
        None,
        description="which GPU each of this host's workers uses, prefill workers first; default: one after the other, "
        "with cuda_ipc all the first",
    )
    local_prefill_max_tokens: int | Literal["unlimited"] = Field(
        "unlimited",
        description="a decode worker prefills prompts with at most this many uncached tokens itself; 0: never",
    )

    @model_validator(mode="after")
    def consistent(self):
        if self.prefill_workers == 0 and self.local_prefill_max_tokens != "unlimited":
            raise ValueError("without prefill workers local_prefill_max_tokens must be 'unlimited' (colocated)")
        if self.prefill_workers == 0 and self.channel != "local":
            raise ValueError(f"channel {self.channel!r} needs at least one prefill worker")
        if self.prefill_workers > 0 and self.channel == "local":
            raise ValueError("channel 'local' joins two engines of one process; set prefill_workers: 0")
        if self.channel in SHARED_POOL_CHANNELS and self.prefill_workers != 1:
            raise ValueError(f"channel {self.channel!r} shares one pool, owned by exactly one prefill worker")
        if self.gpus is not None:
            num_workers = self.prefill_workers + self.decode_workers
            if len(self.gpus) != num_workers or min(self.gpus, default=0) < 0:
                raise ValueError(f"gpus {self.gpus} must hold an index for each of the {num_workers} workers")
            if self.channel == "cuda_ipc" and len(set(self.gpus)) > 1:
                raise ValueError(f"channel 'cuda_ipc' shares a pool on one GPU, gpus {self.gpus} are several")
        if isinstance(self.local_prefill_max_tokens, int) and self.local_prefill_max_tokens < 0:
            raise ValueError("local_prefill_max_tokens must be 'unlimited' or at least 0")
        return self


class PrefillSection(Section):
    chunk_tokens: int | None = Field(
        None, ge=1, description="most prompt tokens computed in one prefill step; default: 512, on a GPU 8192"
    )
    max_sequences: int = Field(16, ge=1, description="most prompts that share one prefill step")
    second_stream: bool = Field(False, description="a GPU's decode worker computes prompts beside its decode steps")


class DecodeSection(Section):
    max_running: int | None = Field(
        None, ge=1, description="most sequences in the running batch of a decode worker; default: 32, on a GPU 128"
    )
    tpot_target_ms: float | None = Field(
        None,
        gt=0,
        description="a decode worker that prefills keeps its chunks so short that running sequences get a token this "
        "often; default: whole chunks",
    )
    overlap: bool | None = Field(
        None, description="launch the next step before the last one's tokens are read; default: on a GPU"
    )
    cuda_graphs: bool = Field(True, description="replay recorded launches (GPU)")
    shared_prefix: bool = Field(True, description="read blocks that running sequences share once for all of them (GPU)")


class TransferSection(Section):
    lease_s: float = Field(30.0, gt=0, description="blocks held for a silent peer are reclaimed after this long")
    heartbeat_s: float = Field(1.0, gt=0, description="how often decode workers renew their leases")

    @model_validator(mode="after")
    def outlasts_heartbeats(self):
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(f"lease_s {self.lease_s:g} must be at least twice heartbeat_s {self.heartbeat_s:g}")
        return self


class RouterSection(Section):
    host: str = Field("127.0.0.1", description="address the HTTP API listens on")
    max_waiting: int = Field(256, ge=0, description="requests held beyond what decode workers run; more get a 429")
    request_timeout_s: float = Field(600.0, gt=0, description="deadline of a request, from its arrival")
    health_timeout_s: float = Field(5.0, gt=0, description="/health fails when an engine loop takes longer to answer")
    drain_timeout_s: float = Field(30.0, ge=0, description="on SIGTERM, how long running requests may take to end")
    max_retries: int = Field(3, ge=0, description="how often a request lost with a worker is submitted again")
    served_model_name: str | None = Field(
        None,
        description="model id in the API and the only name taken; default: the directory's name, and any name is taken",
    )
    strip_system_lines: list[re.Pattern[str]] = Field(
        [], description="a line of a system message that one of these matches wholly is left out of the prompt"
    )
    prompt_history: int = Field(0, ge=0, description="prompts kept for GET /prompts, which tells where they diverge")


@dataclass(frozen=True)
class ResolvedConfig:
    """Values whose defaults depend on the device."""

    chunk_tokens: int
    max_running: int
    overlap: bool


class DeploymentConfig(Section):
    """Everything a deployment is. `load_config` reads it from a file in configs/ or any path."""

    description: str = Field("", description="what the deployment is for")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    deterministic: bool = Field(
        False, description="on a GPU: the same bits whatever else is in the batch, at some cost (always so on CPU)"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of each worker; default: cores / workers")
    model: ModelSection = ModelSection()
    kv: KVSection = KVSection()
    topology: TopologySection = TopologySection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    transfer: TransferSection = TransferSection()
    router: RouterSection = RouterSection()

    @model_validator(mode="after")
    def channel_reaches_device(self):
        if self.device == "cuda" and self.topology.channel in CPU_CHANNELS:
            raise ValueError(f"channel {self.topology.channel!r} moves blocks of CPU pools; set device: cpu")
        if self.device == "cpu" and self.topology.channel in GPU_CHANNELS:
            raise ValueError(f"channel {self.topology.channel!r} moves blocks of GPU pools; set device: cuda")
        return self

    def choose_device(self, has_cuda: bool) -> Literal["cpu", "cuda"]:
        """Where the model runs. `auto` is the GPU when there is one and the channel reaches it."""
        if self.device != "auto":
            return self.device
        return "cuda" if has_cuda and self.topology.channel not in CPU_CHANNELS else "cpu"

    def on(self, device: str) -> "ResolvedConfig":
        """What the values left open are on a device."""
        gpu = device != "cpu"
        return ResolvedConfig(
            chunk_tokens=self.prefill.chunk_tokens or (GPU_CHUNK_TOKENS if gpu else CPU_CHUNK_TOKENS),
            max_running=self.decode.max_running or (GPU_MAX_RUNNING if gpu else CPU_MAX_RUNNING),
            overlap=gpu if self.decode.overlap is None else self.decode.overlap,
        )

    def worker_gpus(self, num_gpus: int) -> list[int]:
        """The GPU of each worker, prefill workers first, on a host with `num_gpus`. Raises ConfigError for one that is
        not there."""
        if self.topology.gpus is None:
            shared = self.topology.channel in SHARED_POOL_CHANNELS
            return [0 if shared else index % num_gpus for index in range(self.num_workers)]
        missing = [index for index in self.topology.gpus if index >= num_gpus]
        if missing:
            raise ConfigError(f"topology.gpus names GPU {missing[0]}, this host has {num_gpus}, counted from 0")
        return self.topology.gpus

    @property
    def num_workers(self) -> int:
        return self.topology.prefill_workers + self.topology.decode_workers

    @property
    def worker_threads(self) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // self.num_workers)


def load_config(name: str) -> DeploymentConfig:
    """Read a deployment from a path, or by name from configs/ (`auto`, `disagg-cpu-tcp`, ...).

    Raises ConfigError with one line that names the file, the key and the problem.
    """
    path = Path(name)
    if not path.is_file():
        path = CONFIG_DIR / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIG_DIR.glob("*.yaml")))
        raise ConfigError(f"no configuration {name!r}; give a path or one of: {known}")
    try:
        values = yaml.safe_load(path.read_text()) or {}
        return DeploymentConfig.model_validate(values)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise ConfigError(f"{path}: {where}: {first['msg']}") from None
