"""The extension of vLLM's workers: it takes weights, sleeps and reports. vLLM's processes import it."""

from __future__ import annotations

from typing import Any

import torch

from practicum.compat.vllm import (
    CpuSleep,
    PlainLogprobSampler,
    reload_weights,
    repair_adapter_products,
    weight_bytes,
)
from practicum.engines.shared_memory import SharedWeights
from practicum.errors import EngineError
from practicum.models.offloaded_weights import return_memory

repair_adapter_products()  # vLLM imports this module before it makes the model


class PracticumWorker:
    """Mixed into vLLM's worker class (`worker_extension_cls`). `collective_rpc` calls its methods."""

    model_runner: Any

    def practicum_prepare(self, vocab: int, keeps_weights: bool) -> None:
        """Set up sampling and sleeping. Called once, before anything else."""
        self._practicum_sampler = PlainLogprobSampler.take_over(self.model_runner.sampler, vocab)
        self._practicum_sleep = CpuSleep(self.model_runner, keeps_weights=keeps_weights)

    def practicum_facts(self) -> tuple[int, int, int]:
        """Return the bytes of weights and of KV memory, and the number of threads."""
        runner = self.model_runner
        # Layers may have their KV memory in one block.
        blocks = {c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in runner.kv_caches}
        return weight_bytes(runner.get_model()), sum(blocks.values()), torch.get_num_threads()

    def practicum_score_by(self, temperature: float, vocab: int) -> None:
        """Set temperature and vocabulary of the prompts that are scored from now on."""
        self._practicum_sampler.temperature, self._practicum_sampler.vocab = temperature, vocab

    def practicum_load(self, path: str | None) -> str | None:
        """Replace all weights by those of a file of `shared_weights`, or by those of the model's folder.
        Returns an error's message: after an exception, vLLM leaves the replies of other workers unread."""
        try:
            reload_weights(self.model_runner, None if path is None else SharedWeights(path))
        except Exception as error:
            return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        return_memory(self.model_runner.device)
        return None

    def practicum_sleep(self) -> None:
        """Free memory on a CPU."""
        self._practicum_sleep.begin()
        return_memory(self.model_runner.device)

    def practicum_wake(self) -> None:
        """Allocate the memory again."""
        self._practicum_sleep.end()
