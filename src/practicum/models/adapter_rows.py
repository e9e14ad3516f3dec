"""Several adapters on one base in memory: each row of a forward call is computed with its own adapter.

A linear layer multiplies all rows by its weight at once, then adds to the rows of each adapter the product of
its two small matrices. What PEFT adapts in another way, such as experts, is computed adapter by adapter. No
row depends on the adapters of the others. For use without gradients.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from practicum.errors import MissingExtraError
from practicum.models.batch_invariance import ROWS, padded_rows
from practicum.models.lora import base_fingerprint, has_adapter, is_adapter
from practicum.models.lora_product import ADAPTER, Factors, is_plain_lora
from practicum.models.saved_adapter import SavedAdapter


class RowPart(NamedTuple):
    """Rows of a forward call from `start` to before `stop`, and the adapter that they have."""

    adapter: str
    start: int
    stop: int


class AdapterRows:
    """The adapters on one base, and which rows of the forward call under way have which."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self.parts: Sequence[RowPart] = ()

    @contextmanager
    def use(self, parts: Sequence[RowPart]) -> Iterator[None]:
        """Inside, these rows have these adapters; all others are the base's."""
        self.parts = parts
        try:
            yield
        finally:
            self.parts = ()


class RowsLayer(nn.Module):
    """A layer of the base, and what adapters make of it."""

    def __init__(self, base: nn.Module, adapted: Mapping[str, nn.Module], rows: AdapterRows) -> None:
        super().__init__()
        self.base_layer, self.adapted, self.rows = base, nn.ModuleDict(adapted), rows
        self.is_product = all(map(is_plain_lora, adapted.values()))
        """Whether all adapters here are products of two small matrices."""
        self._factors = {name: Factors.of(layer) for name, layer in adapted.items() if self.is_product}

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Rows lie along the last but one dimension."""
        if not self.is_product:
            return self._by_part(x, *more)
        result = self.base_layer(x)
        x_N, result_N = x.reshape(-1, x.shape[-1]), result.view(-1, result.shape[-1])
        for part in self.rows.parts:
            if part.adapter in self._factors:
                _add_product(result_N, x_N, part, self._factors[part.adapter])
        return result

    def _by_part(self, *inputs: Tensor) -> Tensor:
        """Each part by its own layer: of inputs that have a row for each row."""
        results, at, end = [], 0, inputs[0].shape[-2]
        for name, start, stop in (*self.rows.parts, RowPart("", end, end)):
            for who, first, last in (("", at, start), (name, start, stop)):
                if first < last:
                    results.append(self._layer(who)(*(x[..., first:last, :] for x in inputs)))
            at = stop
        return results[0] if len(results) == 1 else torch.cat(results, -2)

    def _layer(self, adapter: str) -> nn.Module:
        if adapter in self.adapted:
            return self.adapted[adapter]
        return self.base_layer


def _add_product(result_N: Tensor, x_N: Tensor, part: RowPart, factors: Factors) -> None:
    """Add an adapter's product to the rows of its part.

    A multiple of ROWS of them is taken, so that the bits do not depend on the batch: neighbours' rows, which
    are not copied, with a product of 0.
    """
    _, start, stop = part
    first, last = start // ROWS * ROWS, padded_rows(stop)
    rows_N = x_N[first:last]
    down, up, scaling = factors
    if x_N.dtype != down.dtype:
        inner_N = linear(rows_N.to(down.dtype), down)
        result_N[start:stop].add_(linear(inner_N, up)[start - first : stop - first].mul_(scaling))
        return
    inner_N = linear(rows_N, down)
    if first < start:
        inner_N[: start - first] = 0.0
    if stop < last:
        inner_N[stop - first :] = 0.0
    result_N[first:last].addmm_(inner_N, up.t(), alpha=scaling)


def rows_of(model: nn.Module) -> AdapterRows | None:
    """The adapters of a model that `put_adapters` made; None of another one."""
    return next((module.rows for module in model.modules() if isinstance(module, RowsLayer)), None)


def bare_base(model: PreTrainedModel) -> PreTrainedModel:
    """The base of a model with an adapter as a model of its own, by the same tensors; nothing is copied."""
    tensors = [*model.parameters(), *model.buffers()]
    bare = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if has_adapter(bare):
        _take_out(bare)
    return bare.eval()


def put_adapters(base: PreTrainedModel, adapters: Mapping[str, SavedAdapter], about: str) -> None:
    """Put adapters on a model without one, under these names; it is frozen then.

    An adapter of another base is a RecipeError before any is loaded; `about` says there what the base is.
    """
    fingerprint = base_fingerprint(base)
    for saved in adapters.values():
        saved.check_base(fingerprint, about)
        saved.check_fits(base, about)
    base.requires_grad_(False)
    rows = AdapterRows([*adapters])
    by_layer: dict[str, dict[str, nn.Module]] = {}
    for name, saved in adapters.items():
        for place, layer in _peft_layers(base, saved).items():
            by_layer.setdefault(place, {})[name] = layer
    for place, layers in by_layer.items():
        base.set_submodule(place, RowsLayer(base.get_submodule(place), layers, rows))
    base.eval()


def _peft_layers(base: PreTrainedModel, saved: SavedAdapter) -> dict[str, nn.Module]:
    """PEFT's layers with an adapter's weights, by the names of those that they adapt; the base stays bare."""
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise MissingExtraError(saved.key, "lora") from None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        inject_adapter_in_model(saved.peft_config(), base, ADAPTER)
    own = {name: p for name, p in base.named_parameters() if is_adapter(name)}
    try:
        saved.check_parameters({name: tuple(p.shape) for name, p in own.items()}, "its base")
        for name, weight in saved.weights().items():
            wide = torch.promote_types(own[name].dtype, torch.float32)
            own[name].data = weight.to(own[name].device, wide)
            own[name].requires_grad_(False)
    finally:
        layers = _take_out(base)
    return layers


def _take_out(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Put the layers that PEFT wrapped back into their places; gives the outermost wrappers by place."""
    wrapped: dict[str, Any] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in wrapped)
        if getattr(module, "lora_A", None) is not None and not is_inside:
            wrapped[name] = module
    for name, module in wrapped.items():
        model.set_submodule(name, module.get_base_layer())
    del model.peft_config
    return wrapped
