"""The configuration of one deployment: one YAML file, one model. Unknown keys are errors."""

import os
import re
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"

ChannelName = Literal["local", "shm", "tcp"]
SHARED_POOL_CHANNELS = ("shm",)
CPU_CHANNELS = ("shm", "tcp")


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which value is wrong and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    dir: str | None = Field(None, description="Hugging Face model directory; the MODEL_DIR variable wins over it")
    weights: Literal["files", "random"] = Field("files", description="random: the same shapes without weight files")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="auto: float32 on CPU")
    max_model_len: int | None = Field(None, ge=2, description="tokens in prompt plus output; default: the model's own")


class KVSection(Section):
    block_size: int = Field(64, ge=1, description="tokens in a KV block")
    pool_tokens: int | None = Field(
        None, ge=2, description="tokens a worker's KV pool holds; default: from free memory"
    )
    prefix_cache: bool = Field(True, description="reuse the KV of prompt prefixes already computed")


class TopologySection(Section):
    prefill_workers: int = Field(0, ge=0, description="0: colocated, decode workers prefill every prompt themselves")
    decode_workers: int = Field(1, ge=1, description="each runs a batch of its own")
    channel: ChannelName = Field("local", description="how KV blocks reach decode workers")
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
        if isinstance(self.local_prefill_max_tokens, int) and self.local_prefill_max_tokens < 0:
            raise ValueError("local_prefill_max_tokens must be 'unlimited' or at least 0")
        return self


class PrefillSection(Section):
    chunk_tokens: int = Field(512, ge=1, description="most prompt tokens computed in one prefill step")
    max_sequences: int = Field(16, ge=1, description="most prompts that share one prefill step")


class DecodeSection(Section):
    max_running: int = Field(32, ge=1, description="most sequences in the running batch of a decode worker")


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


class DeploymentConfig(Section):
    """Everything a deployment is. `load_config` reads it from a file in configs/ or any path."""

    description: str = Field("", description="what the deployment is for")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
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
        return self

    def choose_device(self, has_cuda: bool) -> Literal["cpu", "cuda"]:
        """Where the model runs. `auto` is the GPU when there is one and the channel reaches it."""
        if self.device != "auto":
            return self.device
        return "cuda" if has_cuda and self.topology.channel not in CPU_CHANNELS else "cpu"

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
