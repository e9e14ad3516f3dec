"""New weights for a vLLM model that runs: all of them, or an error that names what is wrong.

vLLM itself only warns of weights that did not come, and goes on from the middle after a load that failed. In
the engine's process only: importing this imports vLLM.
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

from practicum.errors import EngineError

_NAMED = 3


def reload(runner: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights by the names that they have in transformers; whole ones must follow an error."""
    model, config = runner.get_model(), runner.model_config
    seen = _Seen(weights)
    _pack_experts_again(model)
    initialize_layerwise_reload(model)
    try:
        model.load_weights(iter(seen))
        if config.quantization is None and (missing := list(_missing(model))):
            named = ", ".join([*missing[:_NAMED], *["…"][: len(missing) > _NAMED]])
            raise EngineError(
                f"{len(missing)} layers did not get all of their weights: {named}. Engine and "
                "learner must hold the same architecture"
            )
    except Exception as error:
        _put_back(model)
        if isinstance(error, EngineError) or seen.last is None:
            raise
        raise EngineError(f"weights do not fit vLLM's model at {seen.last}: {_words(error)}") from error
    finalize_layerwise_reload(model, config)
    _repack_head(model)


def reload_folder(runner: Any) -> None:
    """Read the weights of the model's folder again."""
    runner.reload_weights()
    _repack_head(runner.get_model())


def weight_bytes(model: nn.Module) -> int:
    """Of all weights, with the packed copies that vLLM computes with on a CPU and shows to nobody."""
    tensors = [*model.parameters(), *model.buffers()]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    linear: list[Any] = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    if all(layer.weight.numel() for layer in linear):
        return sum(held.values())  # nothing is packed: a layer that is gives up its weight
    packed = (get_layerwise_info(layer).restore_metadata[0]["weight"].nbytes for layer in linear)
    return sum(held.values()) + sum(packed)


class _Seen:
    """Passes weights on, and knows which came last."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.last: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.last = f"{name} {list(tensor.shape)}"
            yield name, tensor
        self.last = None  # what fails from here on is no weight's fault


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


def _put_back(model: nn.Module) -> None:
    """Undo what `initialize_layerwise_reload` did: the next load must not go on from this one's half."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def _pack_experts_again(model: nn.Module) -> None:
    """On a CPU, vLLM packs experts only for a new kernel: a load into an old one leaves them unpacked."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_head(model: Any) -> None:
    """On a CPU, vLLM computes with a packed copy of the output head; of a tied one it keeps the old copy."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} in vLLM's loader"
