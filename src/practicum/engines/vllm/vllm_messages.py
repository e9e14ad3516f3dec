"""Messages between a vLLM engine and its process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from practicum.engines.protocol import Sampling, Scores

CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would all take the first core
    "TORCHDYNAMO_DISABLE": "1",  # it would stall for a compiler at the first logprobs
    "GOMP_SPINCOUNT": "0",  # threads that wait must not take the cores of others
}
"""What vLLM on a CPU reads from its environment when it is imported."""


TRANSFER = "practicum"
"""The name of our backend of vLLM's weight transfer."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be made for."""
ADAPTED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that may have adapters. Not the head: vLLM takes the adapters of its logits by the places of sampled
tokens, and those of a prompt have others; with several prompts in one pass it ends there."""


def most_rank(rank: int) -> int:
    """The least of the ranks that vLLM can be made for that has room for this one."""
    return next(most for most in RANKS if most >= rank)


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """How to make the engine. The model's folder needs weights only with `loads`: else they are sent."""

    model: str
    dtype: str
    context: int
    slots: int
    kv_bytes: int
    max_logprobs: int
    threads: int
    loads: bool = False
    samples: bool = True
    """Whether answers are sampled, or tokens scored alone."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments of vLLM that override ours."""
    where: str = "rollout"
    """The recipe's section that these settings come from, for error messages."""
    rank: int | None = None
    """The largest rank of the adapters on the model; None: it has none."""
    adapters: int = 1
    """Adapters that requests may name at once."""
    keeps_weights: bool = False
    """Whether weights stay in memory while the engine sleeps, and KV memory alone is freed."""
    tensor_parallel: int = 1
    """Devices that each layer is split over."""

    @property
    def workers(self) -> int:
        """Processes that compute: with more than one, each has its own."""
        arguments = self.arguments()
        return arguments["tensor_parallel_size"] * arguments.get("pipeline_parallel_size", 1)

    def environment(self) -> dict[str, str]:
        """What vLLM and torch read when they are imported."""
        return {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is the one that is set apart
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # it has threads
            "VLLM_LOGGING_LEVEL": "CRITICAL",
            "VLLM_NO_USAGE_STATS": "1",
            "MALLOC_ARENA_MAX": "1",  # of others, the C library does not give all back when it sleeps
            # Packed copies of new weights take the memory of the old ones: new pages cost more than the copy.
            "MALLOC_MMAP_THRESHOLD_": str(2**40),
            "MALLOC_TRIM_THRESHOLD_": str(2**40),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",  # of the libraries that vLLM imports
            **CPU_ENVIRONMENT,
        } | ({} if self.loads else {"HF_HUB_OFFLINE": "1"})

    def arguments(self) -> dict[str, Any]:
        """Engine arguments of vLLM."""
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "enforce_eager": True,
            "max_model_len": self.context,
            "max_num_seqs": self.slots,
            "kv_cache_memory_bytes": self.kv_bytes,
            "max_logprobs": self.max_logprobs,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "load_format": "auto" if self.loads else "dummy",
            "tensor_parallel_size": self.tensor_parallel,
            "worker_extension_cls": "practicum.engines.vllm.vllm_worker.PracticumWorker",
            "weight_transfer_config": {"backend": TRANSFER},
            **self._for_adapters(),
            **self.options,
        }

    def _for_adapters(self) -> dict[str, Any]:
        if self.rank is None:
            return {}
        return {
            "enable_lora": True,
            "max_loras": self.adapters,
            "max_cpu_loras": self.adapters,
            "max_lora_rank": most_rank(self.rank),
            "lora_target_modules": [*ADAPTED_LAYERS],
        }


class VllmFacts(NamedTuple):
    """What a vLLM engine reports when it is ready; nothing before that."""

    weights: int = 0
    kv: int = 0
    vocab: int = 0
    threads: int = 0
    block: int = 0
    """Tokens of a block of KV memory: prompts share whole ones."""
    release: str = ""
    workers: int = 1
    gpus: tuple[str, ...] = ()
    """Of its workers; none on a CPU."""


class GenerateMessage(NamedTuple):
    """One answer to be sampled."""

    ids: list[int]
    sampling: Sampling
    seed: int
    only: int | None = None
    """The one token that it may be."""
    adapter: str | None = None
    """The name of the adapter that it is sampled with; None: the model alone."""


class ScoreMessage(NamedTuple):
    """Tokens to be scored from `start` on; outputs from `vocab` on do not count."""

    ids: list[int]
    start: int
    top_k: int
    temperature: float
    vocab: int
    adapter: str | None = None


def scores_of(ids: Tensor, logprobs: Tensor, version: int) -> Scores:
    """Scores by logprobs [R, 1 + K] of the tokens and of the K most likely, and their ids."""
    top = (ids[:, 1:], logprobs[:, 1:]) if ids.shape[1] > 1 else (None, None)
    return Scores(logprobs[:, 0].contiguous(), *top, version)
