"""A model that runs packed micro-batches on its device, in its precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from practicum.compat.transformers import checkpoint_layers, uses_attention
from practicum.cpu.batch_invariance import LANES, mlp_width, padded_tokens
from practicum.cpu.row_parts import RowParts, parted
from practicum.dataplane.ragged import Ragged
from practicum.devices import is_out_of_memory
from practicum.errors import DataError, EngineError, PracticumError
from practicum.learning.packing import Packed, RowExtras, RowSpans
from practicum.learning.parallel import Parallel, Root
from practicum.learning.update_batch import RouterLoad
from practicum.models.attention import computing_only, laid_out, packed_forward
from practicum.models.experts import routes_of
from practicum.models.fingerprint import fingerprint_ids
from practicum.models.lora import text_layers
from practicum.models.offloaded_weights import return_memory
from practicum.models.state_layers import seam_of
from practicum.models.vision import is_vision, picture_tokens
from practicum.recipe.counts import CPU_MICROBATCH_TOKENS
from practicum.recipe.schema.recipe import Train

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Maximum difference of hidden states in the self-test, relative to their maximum."""


class PackedModel:
    """A transformers model with packed attention (models/load_model.py `ready`), with or without a head.

    The same model may be used elsewhere too. At construction the packed forward is compared with the model's
    own on a short probe. An EngineError names a model that it does not fit. Given `parallel`, the model and
    its `head` are sharded over ranks, which make the same calls. Rank 0 has the weights before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        train: Train,
        parallel: Parallel | None = None,
        head: nn.Module | None = None,
    ) -> None:
        self.model, self.parallel = model, parallel
        self.routes = routes_of(model)
        self._root: Root | None = None
        if parallel is not None:
            heads = [] if head is None else [head]
            self._root = parallel.shard(model, [*text_layers(model).values()], *heads)
        self.device = model.device
        self.token_budget = train.microbatch_tokens
        if self.device.type == "cpu":
            self.token_budget = min(self.token_budget, CPU_MICROBATCH_TOKENS)
        self.halved = 0
        """Number of times that the token budget was halved because memory ran out."""
        mlp = getattr(next(reversed(text_layers(model).values()), None), "mlp", None)
        # Routers record the experts of all tokens, and return more than the output in some families.
        is_plain = isinstance(mlp, nn.Module) and not any("expert" in name for name, _ in mlp.named_modules())
        self._last_mlp = mlp if is_plain and self.routes is None else None
        self._tokens = 0
        """Input tokens of the current micro-batch."""
        self.autocast = train.autocast == "bfloat16"
        self.gradient_checkpointing = train.gradient_checkpointing
        if self.gradient_checkpointing:
            checkpoint_layers(model)
        self.gap = self._self_test()
        """The largest difference of the self-test, as a fraction of the largest hidden state."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logprobs, values and losses: float32, or float64 for a float64 model."""
        return torch.promote_types(self.model.dtype, torch.float32)

    def microbatches(
        self,
        rows: RowSpans,
        *,
        only: Sequence[int] | None = None,
        sampled_M: Tensor | None = None,
        sessions: Sequence[int] | None = None,
    ) -> Iterator[Packed]:
        """Yield micro-batches on the model's device. Arguments are those of `RowSpans.microbatches`. Ranks go
        through equally many: one with fewer runs made-up tokens that leave no trace."""
        mine = rows.microbatches(self.token_budget, rows=only, sampled_M=sampled_M, sessions=sessions)
        missing = 0
        if self.parallel is not None:
            mine = list(mine)
            missing = self.parallel.largest(len(mine)) - len(mine)
        for packed in mine:
            self._tokens = len(packed.ids_N)
            yield packed.to(self.device)
            self._end_pass()
        for _ in range(missing):
            ids = torch.tensor(fingerprint_ids(self.model.config.get_text_config().vocab_size))
            made_up = RowSpans(Ragged.from_rows([ids[:1]]), Ragged.from_rows([ids[1:3]]))
            blank = made_up.pack([0]).to(self.device)
            loss = 0.0 * self.hidden(blank).sum()
            if loss.requires_grad:
                self.backward(loss, blank)
            self._end_pass()

    def attempts(self) -> Iterator[_Attempt]:
        """Yield contexts until one of them does not run out of memory.

        Each retry has micro-batches of half the size, which all later ones have too. Ranks can't agree on
        that in the middle of a pass: on several of them it is an error.
        """
        while True:
            attempt = _Attempt()
            yield attempt
            if not attempt.out_of_memory:
                return
            advice = "set train.gradient_checkpointing, or lower rollout.max_new_tokens or rollout.context"
            failed = f"a micro-batch of {self._tokens:,} tokens ran out of memory"
            if self.parallel is not None:
                advice = f"lower train.microbatch_tokens, raise pools.train.devices, {advice}"
                raise PracticumError(f"{failed} on learner rank {self.parallel.rank}\n  → {advice}")
            if self._tokens > self.token_budget:
                raise PracticumError(f"{failed}, and it is a single row, which can't be split\n  → {advice}")
            self.token_budget, self.halved = self._tokens // 2, self.halved + 1
            return_memory(self.device)

    def _end_pass(self) -> None:
        """Without gradients, free the gathered weights, which the next optimizer step makes stale."""
        if self._root is not None and not torch.is_grad_enabled():
            self._root.let_go()

    def hidden(self, packed: Packed, load: RouterLoad | None = None) -> Tensor:
        """Return the hidden states [M, hidden] that predict the micro-batch's response tokens. Recorded
        experts are replayed. `load` counts those that were taken."""
        if self._root is not None:
            return self._root(lambda: self._hidden(packed, load))
        return self._hidden(packed, load)

    def _hidden(self, packed: Packed, load: RouterLoad | None) -> Tensor:
        pictures = self._picture_tokens(packed) if packed.images else None
        if self._last_mlp is not None:
            last = self.model.config.get_text_config().num_hidden_layers - 1
            packed.layout.narrow(last, packed.gather_M)
        with self._routed(packed, load), self._last_layer(packed):
            hidden_N = packed_forward(
                self.model, packed.ids_N, packed.positions_N, packed.layout, packed.images, pictures
            )
        return hidden_N.index_select(0, packed.gather_M)

    def _picture_tokens(self, packed: Packed) -> Tensor:
        """Return a mask of image tokens, excluding equal tokens that the model sampled."""
        config = self.model.config
        if not is_vision(config):
            raise DataError(f"rows came with images, which {type(self.model).__name__} does not take")
        picture_N = torch.zeros_like(packed.ids_N, dtype=torch.bool)
        for images, place in zip(packed.images, packed.image_prompts, strict=True):
            place = place.to(picture_N.device)
            ids = packed.ids_N[place].tolist()
            picture_N[place] = picture_tokens(config, ids, images).to(picture_N.device)
        return picture_N

    def backward(self, loss: Tensor, packed: Packed) -> None:
        # Layers that are computed again in the backward pass must take the same experts and rows again.
        layout = laid_out(self.model, packed.layout, len(packed.ids_N))
        with self._routed(packed), self._last_layer(packed), layout:
            loss.backward()

    def parted(self, packed: Packed) -> AbstractContextManager[None]:
        """Context manager in which layers keep gradients of the micro-batch's parts apart, if it has any."""
        if (parts := packed.parts) is None:
            return nullcontext()
        width, head = mlp_width(self.model), self.model.get_output_embeddings()
        of_some = ((self._last_mlp, packed.gather_M.unique(), width), (head, packed.gather_M, LANES))
        inputs: dict[Tensor, RowParts] = {}
        for module, token_M, lanes in of_some:
            rows = parts.take(token_M, padded_tokens(len(token_M), lanes))
            inputs |= dict.fromkeys(() if module is None else module.parameters(), rows)
        return parted(parts.take(slice(None), padded_tokens(len(packed.ids_N), width)), inputs)

    def _last_layer(self, packed: Packed) -> AbstractContextManager[None]:
        """Context manager in which the last layer's MLP computes only the tokens that predict."""
        return computing_only(self._last_mlp, packed.gather_M, mlp_width(self.model))

    @contextmanager
    def _routed(self, packed: Packed, load: RouterLoad | None = None) -> Iterator[None]:
        """Context manager in which the forward pass uses the micro-batch's recorded experts, if any."""
        if packed.experts_N is not None:
            if self.routes is None:
                name = type(self.model).__name__
                raise DataError(f"rows came with routed_experts, but {name} has no routers to replay them")
            with self.routes.replay(packed.experts_N) as moved:
                yield
            if load is not None:
                load.add(packed.experts_N, moved.share())
        elif load is not None and self.routes is not None:
            with self.routes.record() as taken:
                yield
            load.add(taken.tensor()[: len(packed.ids_N)])
        else:
            yield

    def precision(self, *, mixed: bool = True) -> torch.autocast:
        """Return the context of the forward pass and the head: mixed precision with train.autocast."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast and mixed)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager in which, with train.gradient_checkpointing, activations are recomputed."""
        # transformers' layers recompute in training mode only; dropout is off either way.
        self.model.train(self.gradient_checkpointing)
        try:
            yield
        finally:
            self.model.eval()

    @torch.no_grad()
    def _self_test(self) -> float:
        """Compare hidden states of packed rows that begin alike with the model's own forward."""
        name = type(self.model).__name__
        if not uses_attention(self.model):
            raise EngineError(
                f"practicum can't train {name}, because its attention can't be replaced (transformers' "
                "AttentionInterface)"
            )
        allowed = _TOLERANCE[self.model.dtype]
        if seam_of(self.model).states:  # these layers compute in float32 whatever the model's dtype is
            allowed = max(allowed, _TOLERANCE[torch.float32])
        ran: list[nn.Module] = []
        layers = [] if self.parallel is None else [*text_layers(self.model).values()]
        hooks = [layer.register_forward_pre_hook(lambda module, _: ran.append(module)) for layer in layers]
        try:
            gap = self._probe_gap()
            if not gap <= allowed:  # an MLP that mixes tokens
                self._last_mlp = None
                gap = self._probe_gap()
            self._end_pass()
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            raise EngineError(f"{name} can't run packed rows: {type(error).__name__}: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if layers and ran != layers * (len(ran) // len(layers)):
            raise EngineError(f"{name} skips layers in some passes, so ranks can't shard them: use one rank")
        if not gap <= allowed:
            raise EngineError(
                f"practicum can't train {name}: packed rows differ from the model's forward pass by {gap:.2g}"
                f", at most {allowed:.2g} is allowed: its layers do more than causal attention over positions"
            )
        return gap

    def _probe_gap(self) -> float:
        ids = torch.tensor(fingerprint_ids(self.model.config.get_text_config().vocab_size))
        # Three rows share a prompt, and two of these the first tokens of their responses. Two share another.
        prompts = [ids[:5], ids[:5], ids[3:5], ids[:5], ids[3:5]]
        responses = [ids[5:9], ids[8:16], ids[9:12], torch.cat([ids[5:7], ids[1:4]]), ids[:4]]
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
        """Return hidden states of one sequence by the model's own forward pass, and its experts (CPU)."""

        def forward() -> Tensor:
            return self.model.base_model(input_ids=ids_1N, use_cache=False).last_hidden_state[0]

        ids_1N = ids_N.unsqueeze(0).to(self.device)
        run = forward if self._root is None else partial(self._root, forward)
        if self.routes is None:
            return run(), ids_N[:0]
        with self.routes.record() as taken:
            hidden_N = run()
        return hidden_N, taken.tensor().cpu()


class _Attempt:
    """A context that suppresses out-of-memory errors and remembers them."""

    out_of_memory = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.out_of_memory = isinstance(error, RuntimeError) and is_out_of_memory(error)
        return self.out_of_memory
