"""A model and how it is run: packed, in micro-batches, on its device, in its precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from practicum.dataplane.ragged import Ragged
from practicum.devices import is_out_of_memory
from practicum.errors import DataError, EngineError, PracticumError
from practicum.learning.memory_guard import MemoryGuard, MicrobatchTooLargeError, between_layers
from practicum.learning.packing import Packed, RowExtras, RowSpans
from practicum.learning.parallel import Parallel, run_in
from practicum.learning.update_metrics import RouterLoad
from practicum.models.attention import IMPLEMENTATION, packed_forward, run_model
from practicum.models.experts import Routes, routes_of
from practicum.models.fingerprint import fingerprint_ids
from practicum.models.lora import text_layers
from practicum.models.offloaded_weights import return_memory
from practicum.models.vision import is_vision, picture_tokens
from practicum.models.weight_files import WeightFiles
from practicum.recipe.counts import CPU_MICROBATCH_TOKENS
from practicum.recipe.schema.recipe import Train

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of the self-test's hidden states, as a fraction of their largest value."""


T = TypeVar("T")


class PackedModel:
    """A transformers model with packed attention (models/load_model.py `ready`), with or without a head.

    Holds no state of its own: the same model may be used elsewhere too. At construction the packed forward
    is compared with the model's own on a short probe; an EngineError names a model that it does not fit.
    Given `parallel`, the model and its `head` are sharded over ranks: the same calls on each of them. A model
    without weights is then given its shard of those in `files`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        train: Train,
        parallel: Parallel | None = None,
        head: nn.Module | None = None,
        files: WeightFiles | None = None,
    ) -> None:
        self.model, self.parallel = model, parallel
        self.device = model.device if files is None else files.device
        self.token_budget = train.microbatch_tokens
        if self.device.type == "cpu":
            self.token_budget = min(self.token_budget, CPU_MICROBATCH_TOKENS)
        self.halved = 0
        """How often the token budget was halved because memory ran out."""
        self.autocast = train.autocast == "bfloat16"
        self.gradient_checkpointing = train.gradient_checkpointing
        self.routes = routes_of(model)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._run: Callable[..., Tensor] = run_model
        if train.compile:
            assert parallel is None, "the recipe's checks refuse it"
            self._run = torch.compile(run_model, dynamic=True)
        self._root = self._guard = None
        self.gap = 0.0
        """What `self_test` found: the largest difference, in parts of the largest hidden state."""
        if files is None:
            self.self_test()
        if parallel is not None:
            layers = [*text_layers(model).values()]
            heads = [] if head is None else [head]
            self._root = parallel.shard(model, layers, *heads, device=self.device)
            if files is not None:
                self._read_shard(files, parallel)
                self.self_test()
            self._guard = MemoryGuard(layers)

    @property
    def dtype(self) -> torch.dtype:
        """Number type of logprobs, values and losses: float32, or float64 for a float64 model."""
        return torch.promote_types(self.model.dtype, torch.float32)

    def microbatches(
        self,
        rows: RowSpans,
        *,
        only: Sequence[int] | None = None,
        sampled_M: Tensor | None = None,
        sessions: Sequence[int] | None = None,
    ) -> Iterator[Packed]:
        """Micro-batches on the model's device; arguments as of `RowSpans.microbatches`."""
        for packed in rows.microbatches(self.token_budget, rows=only, sampled_M=sampled_M, sessions=sessions):
            yield packed.to(self.device)

    def each(self, microbatches: Iterable[Packed], work: Callable[[Packed], Tensor | None]) -> None:
        """Do `work` on each micro-batch, and back-propagate the loss that it gives if gradients are on.

        Ranks must go through equally many: one with fewer runs made-up tokens that leave no trace. One that
        runs out of memory is a MicrobatchTooLargeError: `halving` knows what to do.
        """
        if self.parallel is None:
            for packed in microbatches:
                self._pass(partial(work, packed), packed)
            return
        mine, too_large = list(microbatches), 0
        most = self.parallel.largest(len(mine))
        for packed in mine:
            too_large = max(too_large, self._pass_in_step(partial(work, packed), packed))
        blank = self._blank()
        for _ in range(most - len(mine)):
            too_large = max(too_large, self._pass_in_step(lambda: 0.0 * self.hidden(blank).sum(), blank))
        if tokens := self.parallel.largest(too_large):
            raise MicrobatchTooLargeError(tokens)

    def _pass(self, work: Callable[[], Tensor | None], packed: Packed) -> None:
        try:
            loss = run_in(self._root, work)
            if loss is not None and torch.is_grad_enabled():
                self.backward(loss, packed)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Out here the error is gone, and with it what its frames held.
        raise MicrobatchTooLargeError(len(packed.ids_N))

    def _pass_in_step(self, work: Callable[[], Tensor | None], packed: Packed) -> int:
        """A pass on one of several ranks; gives the micro-batch's tokens if it ran out of memory, else 0."""
        guard, root = self._guard, self._root
        assert guard is not None
        guard.begin()

        def guarded() -> Tensor | None:
            loss = guard.attempt(work)
            if guard.tripped:
                return guard.rest_of_pass(partial(guard.attempt, partial(self.hidden, self._blank())))
            return guard.joined(loss)

        try:
            loss = run_in(root, guarded)
            if loss is not None and torch.is_grad_enabled():
                self.backward(loss, packed)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise PracticumError(between_layers()) from None
        tripped = guard.tripped
        guard.begin()  # it holds nothing of this pass
        return len(packed.ids_N) if tripped else 0

    def halving(self, attempt: Callable[[], T]) -> T:
        """What the attempt gives. If a micro-batch runs out of memory, on any rank, it is made again from its
        start with micro-batches of half the size, which all later ones have too."""
        while True:
            try:
                return attempt()
            except MicrobatchTooLargeError as error:
                tokens = error.tokens
            if tokens > self.token_budget:
                raise PracticumError(_too_large(tokens))
            self.token_budget, self.halved = tokens // 2, self.halved + 1
            return_memory(self.device)

    def _blank(self) -> Packed:
        """A micro-batch of made-up tokens."""
        ids = torch.tensor(fingerprint_ids(self.model.config.get_text_config().vocab_size))
        rows = RowSpans(Ragged.from_rows([ids[:1]]), Ragged.from_rows([ids[1:3]]))
        return rows.pack([0]).to(self.device)

    def _read_shard(self, files: WeightFiles, parallel: Parallel) -> None:
        found = parallel.gather(files.fill(self.model, parallel.rank, parallel.world))
        problems = [*dict.fromkeys(chain(*found))]  # all ranks fail alike
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise EngineError(f"{files.source} does not fit its config: {'; '.join(problems[:3])}{more}")

    def router_load(self) -> RouterLoad | None:
        """To count which experts are taken; None for a model without routers."""
        return RouterLoad(self.routes.experts) if self.routes is not None else None

    def hidden(self, packed: Packed, load: RouterLoad | None = None) -> Tensor:
        """The hidden states [M, hidden] that predict the micro-batch's response tokens.

        Recorded experts are replayed; `load` counts those that were taken.
        """
        with self._routed(packed, load):
            hidden_N = packed_forward(
                self.model,
                packed.ids_N,
                packed.positions_N,
                packed.layout,
                packed.images,
                self._picture_tokens(packed),
                self._run,
            )
            if self._guard is not None and self._guard.tripped:
                raise MicrobatchTooLargeError(len(packed.ids_N))
        hidden_M = hidden_N.index_select(0, packed.gather_M)
        return hidden_M if self._guard is None else self._guard.cut(hidden_M)

    def _picture_tokens(self, packed: Packed) -> Tensor | None:
        """Which input tokens stand for pictures; others may look so, if the model sampled such a token."""
        if not packed.images:
            return None
        config = self.model.config
        if not is_vision(config):
            raise DataError(f"rows came with images, which {type(self.model).__name__} does not take")
        picture_N = torch.zeros_like(packed.ids_N, dtype=torch.bool)
        for images, place in zip(packed.images, packed.image_prompts, strict=True):
            ids = packed.ids_N[place].tolist()
            picture_N[place] = picture_tokens(config, ids, images).to(picture_N.device)
        return picture_N

    def backward(self, loss: Tensor, packed: Packed) -> None:
        """Back-propagate a loss of this micro-batch's hidden states."""
        # Layers that are computed again in the backward pass must take the same experts again.
        with self._routed(packed):
            loss.backward()

    @contextmanager
    def _routed(self, packed: Packed, load: RouterLoad | None = None) -> Iterator[None]:
        """The forward pass inside takes the micro-batch's recorded experts, if it has any."""
        if packed.experts_N is not None:
            with self._need_routes().replay(packed.experts_N) as moved:
                yield
            if load is not None:
                load.add(packed.experts_N, moved.share())
        elif load is not None:
            with self._need_routes().record() as taken:
                yield
            load.add(taken.tensor()[: len(packed.ids_N)])
        else:
            yield

    def _need_routes(self) -> Routes:
        if self.routes is None:
            name = type(self.model).__name__
            raise DataError(f"rows came with routed_experts, but {name} has no routers to replay them")
        return self.routes

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Mixed precision, if the recipe asks for it; the forward pass and the head belong inside."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around forward passes whose activations are to be recomputed, if the recipe asks for that."""
        # transformers' layers recompute in training mode only; dropout is off either way.
        self.model.train(self.gradient_checkpointing)
        try:
            yield
        finally:
            self.model.eval()

    @torch.no_grad()
    def self_test(self) -> None:
        """Compare hidden states of packed rows that share a prompt with the model's own forward."""
        name = type(self.model).__name__
        if self.model.config._attn_implementation != IMPLEMENTATION:
            raise EngineError(
                f"{name} does not let its attention be replaced (transformers' AttentionInterface), so "
                "practicum can't train this architecture"
            )
        ran: list[nn.Module] = []
        layers = [] if self.parallel is None else [*text_layers(self.model).values()]
        hooks = [layer.register_forward_pre_hook(lambda module, _: ran.append(module)) for layer in layers]
        try:
            gap = run_in(self._root, self._probe_gap)
        except (TypeError, ValueError, RuntimeError) as error:
            raise EngineError(f"{name} can't run packed rows: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if layers and ran != layers * (len(ran) // len(layers)):
            raise EngineError(
                f"{name} does not run all of its layers in each pass, so ranks can't share them: use one rank"
            )
        self.gap, allowed = gap, _TOLERANCE[self.model.dtype]
        if not gap <= allowed:
            raise EngineError(
                f"{name}: packed rows differ from the model's own forward pass by {gap:.2g} (allowed: "
                f"{allowed:.2g}), so practicum can't train this architecture: "
                "its layers do more than causal attention over positions"
            )

    def _probe_gap(self) -> float:
        """Largest difference of the two forward passes, as a fraction of the largest hidden state."""
        ids = torch.tensor(fingerprint_ids(self.model.config.get_text_config().vocab_size))
        prompts, responses = [ids[:5], ids[:5], ids[3:5]], [ids[5:9], ids[8:16], ids[9:12]]
        theirs, experts = [], []
        for prompt, response in zip(prompts, responses, strict=True):
            hidden_N, experts_N = self._own_forward(torch.cat([prompt, response[:-1]]))
            theirs.append(hidden_N[prompt.shape[0] - 1 :])
            experts.append(experts_N)
        extras = None
        if self.routes is not None:
            # Replayed: rounding may turn a router's choice between two experts that are almost alike.
            extras = RowExtras(routed_experts=Ragged.from_rows([pad(e, (0, 0, 0, 0, 0, 1)) for e in experts]))
        rows = RowSpans(Ragged.from_rows(prompts), Ragged.from_rows(responses), extras)
        packed = rows.pack(range(len(prompts))).to(self.device)
        mine_M, theirs_M = self.hidden(packed), torch.cat(theirs)
        return float((mine_M - theirs_M).abs().max() / theirs_M.abs().max())

    def _own_forward(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of one sequence by the model's own forward pass, and the experts taken (CPU)."""
        ids_1N = ids_N.unsqueeze(0).to(self.device)
        if self.routes is None:
            return self.model.base_model(input_ids=ids_1N, use_cache=False).last_hidden_state[0], ids_N[:0]
        with self.routes.record() as taken:
            out = self.model.base_model(input_ids=ids_1N, use_cache=False)
        return out.last_hidden_state[0], taken.tensor().cpu()


def _too_large(tokens: int) -> str:
    return (
        f"a micro-batch of {tokens:,} tokens ran out of memory, and it is one row, which can't be cut\n"
        "  → set train.gradient_checkpointing, or lower rollout.max_new_tokens or rollout.context"
    )
