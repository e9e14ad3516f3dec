"""Weights of a vLLM model that runs: replaced by new ones, or freed while it sleeps.

A load takes all of the weights or fails with an error that names what is wrong: vLLM itself only warns of
missing weights, and continues a failed load in the middle. In the processes of vLLM only: importing this
imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import (  # pyright: ignore[reportMissingImports]
    is_deferred_attention_layer,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from practicum.engines.vllm.copy_recorder import CopyRecorder
from practicum.engines.vllm.weight_delivery import missing_weights
from practicum.errors import EngineError
from practicum.models.offloaded_weights import return_memory


class LoaderLoad:
    """One load by vLLM's own loaders, of weights by their names in transformers, in as many parts as they
    come in. After an error, all of them must be loaded again. With `records`, what they copy is recorded."""

    def __init__(self, model: Any, config: Any, *, records: bool = False) -> None:
        self._model, self._config = model, config
        _pack_experts_again(model)
        initialize_layerwise_reload(model)
        self.recorder = CopyRecorder(model) if records else None

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the weights."""
        seen = _LastWeight(weights)
        try:
            if self.recorder is None:
                self._model.load_weights(iter(seen))
            else:
                with self.recorder:
                    self._model.load_weights(self.recorder.watched(seen))
        except Exception as error:
            if isinstance(error, EngineError) or seen.last is None:
                raise
            raise EngineError(
                f"weights do not fit vLLM's model at {seen.last}: {_describe(error)}"
            ) from error

    def finish(self) -> None:
        """Use them, if all have come."""
        if self._config.quantization is None and (missing := list(_missing(self._model))):
            raise EngineError(missing_weights(missing))
        finalize_layerwise_reload(self._model, self._config)
        repack_head(self._model)

    def give_up(self) -> None:
        """Undo what the start did: the next load must not continue this one."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def reload_folder(runner: Any) -> None:
    """Read the weights of the model's folder again."""
    runner.reload_weights()
    repack_head(runner.get_model())


def repack_head(model: Any) -> None:
    """On a CPU, vLLM computes with a packed copy of the output head; of a tied one it keeps the old copy."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)


def process_attention(model: nn.Module, dtype: Any) -> None:
    """Have attention layers compute anew what they derive from weights."""
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(dtype)  # pyright: ignore[reportCallIssue]


def weight_bytes(model: nn.Module) -> int:
    """Of all weights, with the packed copies that vLLM computes with on a CPU and shows to nobody."""
    tensors = [*model.parameters(), *model.buffers()]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    # Layers around others that have adapters show the attributes of those.
    linear: list[Any] = [layer for layer in model.modules() if "cpu_linear" in vars(layer)]
    if all(layer.weight.numel() for layer in linear):
        return sum(held.values())  # nothing is packed: a layer that is gives up its weight
    packed = (get_layerwise_info(layer).restore_metadata[0]["weight"].nbytes for layer in linear)
    return sum(held.values()) + sum(packed)


class VllmSleep:
    """Frees the weights and the KV memory of a worker on a CPU, where vLLM's own sleep frees nothing.

    Tensors lose their storage and packed copies are dropped; loading weights after that fills them again.
    With `keeps_weights`, KV memory alone is freed.
    """

    def __init__(self, runner: Any, *, keeps_weights: bool = False) -> None:
        self._runner, self._keeps = runner, keeps_weights
        self._freed: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """Give memory back; weights that are not kept are lost."""
        for module in self._runner.get_model().modules():
            if not self._keeps and "cpu_linear" in vars(module):
                module.cpu_linear = None  # holds a packed copy of the weights
        for storage in self._storages():
            self._freed.append((storage, storage.nbytes()))
            storage.resize_(0)
        return_memory(self._runner.device)

    def end(self) -> None:
        """Have room again; weights that were not kept must be loaded now."""
        for storage, size in self._freed:
            storage.resize_(size)
            storage.fill_(0)  # old bytes may be NaN, and attention reads whole blocks
        self._freed.clear()

    def _storages(self) -> Iterator[Any]:
        """Of weights and KV memory, each once; buffers are small and no weights, they stay."""
        weights = [] if self._keeps else self._runner.get_model().parameters()
        tensors = [*weights, *self._runner.kv_caches]
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


class _LastWeight:
    """Passes weights on, and remembers the last one for errors."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.last: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.last = f"{name} {list(tensor.shape)}"
            yield name, tensor
        self.last = None  # an error after this is not about one weight


def _missing(model: nn.Module) -> Iterator[str]:
    """Layers that still wait for weights after all have come."""
    infos = {layer: get_layerwise_info(layer) for layer in model.modules()}
    waiting = {layer for layer, info in infos.items() if info.can_load()}
    loaded: set[int] = set()
    for layer, info in infos.items():
        if layer not in waiting or info.load_numel:
            loaded |= {id(p) for p in (info.kernel_tensors or [layer._parameters])[0].values()}
    for name, layer in model.named_modules():
        if layer not in waiting or is_deferred_attention_layer(layer):
            continue
        came, own = infos[layer].load_numel, infos[layer].kernel_tensors[0].values()
        if came == 0 and all(id(p) in loaded for p in own):
            continue  # it has none, or they are tied to those of a layer that got them
        if came and hasattr(layer, "num_embeddings_padded"):
            continue  # as many as there are tokens; vLLM's own has some more
        yield f"{name} ({came} of {sum(p.numel() for p in layer.parameters(recurse=False))} numbers came)"


def _pack_experts_again(model: nn.Module) -> None:
    """On a CPU, vLLM packs experts only for a new kernel: a load into an old one leaves them unpacked."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} in vLLM's loader"
