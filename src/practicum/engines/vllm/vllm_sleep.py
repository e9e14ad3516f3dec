"""Sleep of vLLM in its process: weights and KV memory are given back, all else stays ready.

Where vLLM has a sleep of its own (GPUs) that is used. On a CPU it frees nothing, so tensors lose their
storage and packed copies are dropped; loading weights after that fills them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from practicum.models.offloaded_weights import return_memory


class VllmSleep:
    """Puts the model and the KV memory of an engine to rest, and makes room for them again."""

    def __init__(self, engine: Any, runner: Any) -> None:
        self._engine, self._runner = engine, runner
        self._own = bool(engine.model_config.enable_sleep_mode)
        self._held: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """Give memory back; the weights are lost."""
        if self._own:
            self._engine.sleep(level=2)
            return
        for module in self._runner.get_model().modules():
            if "cpu_linear" in vars(module):
                module.cpu_linear = None  # holds a packed copy of the weights
        for storage in self._storages():
            self._held.append((storage, storage.nbytes()))
            storage.resize_(0)
        return_memory(self._runner.device)

    def end(self) -> None:
        """Have room again, for weights that must be loaded now."""
        if self._own:
            self._engine.wake_up()
            return
        for storage, size in self._held:
            storage.resize_(size)
            storage.fill_(0)  # what lay there may be no numbers, and attention reads whole blocks
        self._held.clear()

    def _storages(self) -> Iterator[Any]:
        """Of weights and KV memory, each once; buffers are small and no weights, they stay."""
        tensors = [*self._runner.get_model().parameters(), *self._runner.kv_caches]
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage
