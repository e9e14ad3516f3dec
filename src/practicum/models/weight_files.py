"""Models whose weights are read later: each rank reads its rows of each weight, so no process has them all.

`load_empty` makes a model on the meta device. Once ranks have cut it into shards, `WeightFiles.fill` reads
the shards of one rank out of the safetensors files, as transformers would have named and merged their
tensors.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file

from practicum.devices import pick_device
from practicum.models.load_model import EXPECTED, load_model, ready, require_model_folder, skeleton
from practicum.models.lora import WRAPPED, add_adapter, is_adapter
from practicum.models.model_files import must_read, read_config
from practicum.recipe.schema.recipe import Model

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DERIVED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Tensors of old files that models compute by themselves today."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors of the files that make a weight: one, or those that a converter puts together."""

    name: str
    converter: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Each tensor's name in the files, and the pattern of the converter that it fits."""

    @property
    def stacks(self) -> bool:
        """Whether the weight's rows are the tensors in their order: experts, each of which has its own."""
        operations = [] if self.converter is None else self.converter.operations
        return (
            bool(operations)
            and isinstance(operations[0], MergeModulelist)
            and operations[0].dim == 0
            and all(isinstance(op, Concatenate) and op.dim > 0 for op in operations[1:])
        )


class WeightFiles:
    """Where the weights of an empty model are, and the device that they go to."""

    def __init__(
        self, model: PreTrainedModel, source: str, files: Sequence[Path], device: torch.device
    ) -> None:
        """`model` is the one that the files were saved from, still without an adapter."""
        self.source, self.device, self._model = source, device, model
        self._files: dict[str, Path] = {}
        for file in files:
            with _opened(file) as opened:
                self._files |= dict.fromkeys(opened.keys(), file)
        expected = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self._first_names = {name: first.setdefault(id(x), name) for name, x in expected.items()}
        """Of weights that have several, because they are tied."""
        self._parts: dict[str, _Part] = {}
        self._unknown: list[str] = []
        self._make_parts(expected)

    def _make_parts(self, expected: Mapping[str, Tensor]) -> None:
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        rename = partial(
            rename_source_key,
            base_model_prefix=self._model.base_model_prefix,
            meta_state_dict=cast(dict[str, Tensor], expected),
        )
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename(key, renamings, converters)
            if name not in expected and key in expected:
                name, pattern = rename(key, [], [])
            if name not in expected:
                self._unknown.append(key)
                continue
            converter = None if pattern is None else copy.deepcopy(by_pattern[pattern])
            part = self._parts.setdefault(name, _Part(name, converter))
            part.sources.append((key, pattern or key))
        ignored = [*(self._model._keys_to_ignore_on_load_unexpected or ()), *_DERIVED]
        self._unknown = [key for key in self._unknown if not any(re.search(x, key) for x in ignored)]
        # As from_pretrained leaves it for save_pretrained.
        self._model._weight_conversions = [entry for entry in mapping if entry.was_used()]  # pyright: ignore

    @torch.no_grad()
    def fill(self, model: PreTrainedModel, rank: int, ranks: int) -> list[str]:
        """Give a model, or its trunk alone, that was cut into shards along its rows the weights of one rank.

        Says what does not fit, in sentences.
        """
        prefix = "" if type(model) is type(self._model) else f"{self._model.base_model_prefix}."
        _replace(model, lambda p: torch.empty_like(p, device=self.device) if p.is_meta else None)
        kept = model.state_dict()
        own = {
            self._first_names.get(name := prefix + own_name.replace(WRAPPED, ""), name): x.detach()
            for own_name, x in (*model.named_parameters(), *model.named_buffers())
            if own_name in kept and not is_adapter(own_name)
        }
        problems = [f"{key} is in the files, and the model has no such weight" for key in self._unknown]
        filled: set[str] = set()
        try:
            for name, found in self._read(own, rank, ranks):
                target, first = own[name], name not in filled
                local = target.to_local() if isinstance(target, DTensor) else target
                filled.add(name)
                if found.shape != local.shape:
                    shapes = f"{list(found.shape)} for a shard of {list(local.shape)} of {list(target.shape)}"
                    problems.append(f"{name} is another weight in the files: {shapes}")
                elif first:
                    local.copy_(found)
                elif not torch.equal(local, found.to(local)):
                    problems.append(f"{name} is tied to another weight, and the files hold both, not equal")
        except (OSError, SafetensorError) as error:
            problems.append(str(error))
        return problems + [f"{name} is not in the files" for name in sorted(own.keys() - filled)]

    def _read(self, own: Mapping[str, Tensor], rank: int, ranks: int) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of weights, by name, tied ones as often as they are in the files."""
        with ExitStack() as stack:
            opened = cache(lambda file: stack.enter_context(_opened(file)))

            def tensor(key: str) -> Any:
                return opened(self._files[key]).get_slice(key)

            for part in self._parts.values():
                name = self._first_names[part.name]
                target = own.get(name)
                if part.converter is None:
                    if target is not None:
                        rows = _rows(target, rank, ranks)
                        yield name, _cut(tensor(part.sources[0][0]), tuple(target.shape), rows)
                elif part.stacks:
                    if target is not None:
                        yield name, self._stacked(part, tensor, target, rank, ranks)
                else:
                    for made, whole in self._converted(part, lambda key, _: tensor(key)[...]).items():
                        made = self._first_names[made]
                        if made in own:
                            rows = _rows(own[made], rank, ranks)
                            yield made, whole if rows is None else whole[rows]

    def _stacked(
        self, part: _Part, tensor: Callable[[str], Any], target: Tensor, rank: int, ranks: int
    ) -> Tensor:
        rows = _rows(target, rank, ranks) or slice(0, len(target))
        if rows.start == rows.stop:
            return torch.empty(0, *target.shape[1:], dtype=target.dtype)

        def mine(key: str, place: int) -> Tensor | None:
            return tensor(key)[...] if rows.start <= place < rows.stop else None

        return self._converted(part, mine)[part.name]

    def _converted(self, part: _Part, read: Callable[[str, int], Tensor | None]) -> dict[str, Tensor]:
        """What transformers makes of a part's tensors; `read` is given their names and places."""
        converter, places = copy.deepcopy(part.converter), dict[str, int]()
        assert converter is not None
        for key, pattern in part.sources:
            place = places.setdefault(pattern, 0)
            converter.add_tensor(part.name, key, pattern, cast(Any, partial(read, key, place)))
            places[pattern] += 1
        made = converter.convert(part.name, model=self._model, config=self._model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}


def load_for_ranks(
    spec: Model, seed: int, ranks: int, *, path: str | None = None, key: str = "model.path"
) -> tuple[PreTrainedModel, WeightFiles | None]:
    """What `load_model` gives, whole; or, for several ranks, the same without weights and where they are.

    Models that are made, quantized ones and those without safetensors files are whole.
    """
    source = path or spec.path
    if ranks > 1 and source is not None:
        require_model_folder(source, key)
        with must_read(source, key, EXPECTED):
            files = _safetensors(source)
            if files and getattr(read_config(source), "quantization_config", None) is None:
                return _load_empty(spec, seed, source, files, own=path is None, key=key)
    return load_model(spec, seed, path=path, key=key), None


def _load_empty(
    spec: Model, seed: int, source: str, files: Sequence[Path], *, own: bool, key: str
) -> tuple[PreTrainedModel, WeightFiles]:
    """A model on the meta device: its buffers and the adapter are made, its weights are not."""
    device = pick_device(spec.device, f"{key.rpartition('.')[0] or 'model'}.device")
    dtype = getattr(torch, spec.dtype)
    model = skeleton(spec.model_copy(update={"path": source}), dtype)
    if wide := model._get_dtype_plan(dtype):
        pattern, groups, _ = build_glob_alternation(list(wide))
        names = {id(x): name for name, x in model.state_dict(keep_vars=True).items()}

        def in_its_type(x: Tensor) -> Tensor | None:
            found = pattern.search(names.get(id(x), ""))
            return None if found is None else x.to(wide[groups[found.lastgroup or ""]])

        _replace(model, in_its_type)
        _replace(model, in_its_type, buffers=True)
    _replace(model, lambda x: torch.empty_like(x, device="cpu"), buffers=True)
    model.initialize_weights()  # of the buffers; what is on the meta device stays there
    try:
        model.generation_config = GenerationConfig.from_pretrained(source)
    except OSError:
        if model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(source, config_file_name="config.json")
    weights = WeightFiles(model, source, files, device)
    if spec.lora is not None and own:
        # PEFT puts an adapter where its layer is. These tensors are on the CPU, and take no memory.
        _replace(model, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape) if p.is_meta else None)
        add_adapter(model, spec.lora, seed, source)
        adapter = {id(p) for name, p in model.named_parameters() if is_adapter(name)}
        _replace(model, lambda p: None if id(p) in adapter else torch.empty_like(p, device="meta"))
    return ready(model, device), weights


def _safetensors(source: str) -> list[Path]:
    """The files of a folder or hub name; none if its weights are in another format."""
    find = partial(cached_file, source, _raise_exceptions_for_missing_entries=False)
    if (alone := find(_WEIGHTS)) is not None:
        return [Path(alone)]
    if (index := find(_INDEX)) is None:
        return []
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [Path(cast(str, cached_file(source, name))) for name in names]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt", backend="pread")
    except TypeError:  # an older one maps the file, whose pages then count as the process's memory
        return safe_open(file, "pt")


def _rows(target: Tensor, rank: int, ranks: int) -> slice | None:
    """The rows that a rank has of a weight, as torch cuts it; None: all of them, or it has none."""
    if not isinstance(target, DTensor):
        return None
    count = -(-len(target) // ranks)
    return slice(min(rank * count, len(target)), min((rank + 1) * count, len(target)))


def _cut(found: Any, shape: tuple[int, ...], rows: slice | None) -> Tensor:
    """Rows of a tensor in a file; all of one that has another shape, which is then seen."""
    return found[...] if rows is None or tuple(found.get_shape()) != shape else found[rows]


def _replace(model: nn.Module, change: Callable[[Any], Tensor | None], *, buffers: bool = False) -> None:
    """Put other parameters (or buffers) in place of those that `change` gives one for; tied ones stay so."""
    changed: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        named = module.named_buffers if buffers else module.named_parameters
        for name, x in list(named(recurse=False)):
            if id(x) not in changed and (new := change(x)) is not None:
                new = new if buffers else nn.Parameter(new, requires_grad=x.requires_grad)
                changed[id(x)] = x, new  # the old one too: its id stays taken
            if id(x) in changed:
                setattr(module, name, changed[id(x)][1])
