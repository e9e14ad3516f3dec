"""Run a model for the torch engine: compute prompts, decode one token per row, sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from practicum.compat.transformers import uses_attention
from practicum.cpu.adapter_rows import RowPart
from practicum.cpu.batch_invariance import (
    ROWS,
    activations_are_invariant,
    attention_is_invariant,
    mlp_width,
)
from practicum.cpu.lean_decoder import lean_decoder
from practicum.engines.torch.kv_memory import (
    DecodeLayout,
    ExtendLayout,
    Extension,
    KvMemory,
    PrefillLayout,
    PromptKv,
)
from practicum.engines.torch.prompt_cache import CachedSequence, PrefilledPrompt, PromptKey
from practicum.engines.torch.sampler import Draw, Sampled, sample
from practicum.errors import EngineError
from practicum.models.attention import Layout, LogitScalings, head_logits, packed_forward
from practicum.models.experts import routes_of
from practicum.models.fingerprint import fingerprint_ids
from practicum.models.lora import rows_of
from practicum.models.padded_attention import AttentionRule
from practicum.models.state_layers import seam_of
from practicum.models.vision import (
    AXES,
    Images,
    is_vision,
    picture_tokens,
    probe_images,
    sequence_positions,
)

LOGITS_AT_ONCE = 2**24
SAMPLED_AT_ONCE = 2**20
"""Maximum logits per softmax and cumulative sum, so that both stay in the cache."""
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass(slots=True)
class StepInputs:
    """Packed tokens. In vision models, positions are [N, D], and images and non-zero shifts may occur."""

    ids_N: Tensor
    positions_N: Tensor
    shifts: Sequence[int]
    """Offset of each sequence between a later token's position and the number of tokens before it."""
    images: Sequence[Images] = ()
    picture_N: Tensor | None = None
    """Mask of image tokens, or None without images."""
    experts_N: Tensor | None = None
    """Experts to replay [N, L, E], with -1 where the routers choose, or None if they always choose."""


class ModelRunner:
    """A model with the fastest equivalent forward pass. Raises EngineError for models it can't run.

    Both are decided by comparison with the model's plain forward pass, so that unsupported attention is an
    error here rather than wrong samples later.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kind = type(model).__name__
        if not uses_attention(model):
            raise EngineError(f"{kind} is not prepared for packed attention: load it with models.load_model")
        self.model, self.device = model, model.device
        self.vocab: int = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        self.hidden_size: int = model.get_input_embeddings().weight.shape[1]  # pyright: ignore
        self.sees = is_vision(model.config)
        self.routes = routes_of(model)
        self.adapters = rows_of(model)
        """Adapters of rows, if the model has several."""
        self.seam = seam_of(model)
        self.seam.adapters = self.adapters
        self.lean = lean_decoder(model)
        """The lean forward pass, if its numbers equal the model's."""
        try:
            gap, most = _probe(self)
            if self.lean is not None and not gap <= most:
                self.lean = None
                gap, most = _probe(self)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            raise EngineError(f"{kind} can't run packed tokens: {type(error).__name__}: {error}") from error
        if not gap <= most:
            raise EngineError(
                f"the logits of {kind} with packed attention differ by {gap:.2g} from the plain forward pass "
                f"(maximum {most:.2g}): the torch engine can't run this architecture"
            )
        with torch.no_grad():
            self.token_kv = prefill(self, [PromptKey((0,))])[0].kv
            """The cache of one token, for the shape of KV memory."""
            self.invariant = _is_invariant(self)
            """True if a token's bits do not depend on its batch, see `cpu/batch_invariance.py`."""
        self.forget_packed()

    def hidden(
        self,
        inputs: StepInputs,
        layout: Layout,
        parts: Sequence[RowPart] = (),
        wanted_M: Tensor | None = None,
    ) -> Tensor:
        """Return last hidden states of packed tokens, [M, hidden] of those that are wanted, by default all.
        `parts` assigns adapters to the packed tokens."""
        if parts:
            assert self.adapters is not None
            with self.adapters.use(parts):
                hidden_N = self.hidden(inputs, layout)
            return hidden_N if wanted_M is None else hidden_N[wanted_M]
        if self.lean is not None:
            # Decoding multiplies few rows by the same weights repeatedly.
            pack = isinstance(layout, DecodeLayout)

            def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
                return layout.attend(layer, query, key, value, AttentionRule(scale))

            return self.lean(inputs.ids_N, inputs.positions_N, attend, pack=pack, wanted_M=wanted_M)
        hidden_N = packed_forward(
            self.model, inputs.ids_N, inputs.positions_N, layout, inputs.images, inputs.picture_N
        )
        return hidden_N if wanted_M is None else hidden_N[wanted_M]

    def routed(
        self, inputs: StepInputs, layout: Layout, wanted_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return `hidden`, and for MoE models the experts of all tokens [N, L, E]."""
        routes, known_N = self.routes, inputs.experts_N
        if routes is None:
            return self.hidden(inputs, layout, wanted_M=wanted_M), None
        with routes.record() as taken, nullcontext() if known_N is None else routes.replay(known_N):
            hidden = self.hidden(inputs, layout, wanted_M=wanted_M)
        return hidden, taken.tensor()[: len(inputs.ids_N)]

    def logits(self, hidden_N: Tensor, *, pack: bool = False) -> Tensor:
        """Return logits [N, V] of last hidden states. With `pack`, pack the head for later calls."""
        if self.lean is not None:
            return LogitScalings.of(self.model).apply(self.lean.head(hidden_N, pack=pack))
        return head_logits(self.model, hidden_N)

    def forget_packed(self, weights: Iterable[Tensor] | None = None) -> None:
        """Drop packed copies of weights that may have changed, or all."""
        if self.lean is not None:
            self.lean.packed.forget(weights)

    @property
    def packed_bytes(self) -> int:
        return 0 if self.lean is None else self.lean.packed.nbytes


def prefill(runner: ModelRunner, prompts: Sequence[PromptKey]) -> list[PrefilledPrompt]:
    """Compute prompts in one packed forward pass."""
    lengths = [len(prompt) for prompt in prompts]
    layout = PrefillLayout(lengths, runner.device)
    if runner.lean is not None:
        layout.narrow(runner.lean.layers - 1, torch.tensor(lengths).cumsum(0) - 1)
    return _compute(
        runner, pack(runner.model.config, prompts, runner.device), layout, lengths, layout.prompts
    )


def extend(
    runner: ModelRunner,
    memory: KvMemory,
    prompts: Sequence[PromptKey],
    begun: Sequence[tuple[int, CachedSequence]],
) -> list[PrefilledPrompt]:
    """Compute the rest of prompts whose slots hold a cached prefix. The results are views of the slots."""
    starts = [len(kept) for _, kept in begun]
    new = [len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)]
    slots = [slot for slot, _ in begun]
    layout = ExtendLayout(memory, list(map(Extension, slots, starts, new)), runner.device)
    inputs = pack(runner.model.config, prompts, runner.device, starts)
    computed = _compute(
        runner, inputs, layout, new, lambda: list(map(memory.prompt, slots, map(len, prompts)))
    )
    for prompt, (_, kept) in zip(computed, begun, strict=True):
        if prompt.experts is not None and kept.experts is not None:
            prompt.experts = torch.cat([kept.experts, prompt.experts])
    return computed


def _compute(
    runner: ModelRunner,
    inputs: StepInputs,
    layout: Layout,
    lengths: Sequence[int],
    kv: Callable[[], list[PromptKv]],
) -> list[PrefilledPrompt]:
    """Run a forward pass over prompts of these lengths, then call `kv`."""
    last_G = torch.tensor(lengths, device=runner.device).cumsum(0) - 1
    hidden_GH, experts_N = runner.routed(inputs, layout, last_G)
    experts = [None] * len(lengths)
    if experts_N is not None:
        experts = [part.clone() for part in experts_N.cpu().split(list(lengths))]
    parts = zip(kv(), hidden_GH.unbind(), inputs.shifts, experts, strict=True)
    return [PrefilledPrompt(*part) for part in parts]


def decode(
    runner: ModelRunner, memory: KvMemory, token_B: Tensor, length_B: Tensor, position_B: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Decode one new token for each slot after its `length` tokens. The default position is `length`. Return
    last hidden states [B, hidden] and experts."""
    inputs = StepInputs(token_B, length_B if position_B is None else position_B, ())
    return runner.routed(inputs, DecodeLayout(memory, length_B))


def sample_hidden(
    runner: ModelRunner, hidden_S: Tensor, draw: Draw, uniform_B: Tensor, row_B: Tensor
) -> Sampled:
    """Sample from rows `row_B`, which ascend, never holding more than LOGITS_AT_ONCE logits."""
    rows, fine_rows = (max(ROWS, most // runner.vocab) for most in (LOGITS_AT_ONCE, SAMPLED_AT_ONCE))
    ends = [0, *torch.bincount(row_B, minlength=len(hidden_S)).cumsum(0).tolist()]
    parts: list[Sampled] = []
    first = 0
    for hidden in hidden_S.split(rows):
        for logits_SV in runner.logits(hidden, pack=True).split(fine_rows):
            drawn = slice(ends[first], ends[first + len(logits_SV)])
            parts.append(sample(logits_SV, draw, uniform_B[drawn], row_B[drawn] - first))
            first += len(logits_SV)
    return parts[0] if len(parts) == 1 else Sampled(*map(torch.cat, zip(*parts, strict=True)))


def pack(
    config: Any,
    sequences: Sequence[PromptKey],
    device: torch.device,
    starts: Sequence[int] = (),
    tails: Sequence[tuple[int, ...]] = (),
) -> StepInputs:
    """Pack sequences one after the other, each with its tail, by default none. Packs the tokens from `starts`
    on, by default all. Images must precede a tail and a start above 0."""
    tails = tails or [()] * len(sequences)
    cuts = list(zip(sequences, starts or [0] * len(sequences), strict=True))
    parts = [(s.ids + tail)[start:] for (s, start), tail in zip(cuts, tails, strict=True)]
    if vision := is_vision(config):
        whole = [sequence_positions(config, s.ids, s.images) for s in sequences]
        shifts = [int(p[-1].max()) + 1 - len(p) for p in whole]
    else:
        whole, shifts = [torch.arange(len(s)) for s in sequences], [0] * len(sequences)
    positions: list[Tensor] = []
    for (s, start), before, shift, tail in zip(cuts, whole, shifts, tails, strict=True):
        straight = torch.arange(len(s), len(s) + len(tail)) + shift
        straight = straight.unsqueeze(1).expand(-1, AXES) if vision else straight
        positions.append(torch.cat([before, straight])[start:])
    known = [None if s.experts is None else s.experts[start:] for s, start in cuts]
    inputs = StepInputs(
        torch.tensor([i for part in parts for i in part], device=device),
        torch.cat(positions).to(device),
        shifts,
        [s.images for s, start in cuts if s.images is not None and not start],
        experts_N=_known_experts(list(map(len, parts)), known, device),
    )
    if inputs.images:
        pictures = [
            pad(picture_tokens(config, s.ids, s.images), (0, len(tail)))[start:]
            for (s, start), tail in zip(cuts, tails, strict=True)
        ]
        inputs.picture_N = torch.cat(pictures).to(device)
    return inputs


def _known_experts(
    lengths: Sequence[int], known: Sequence[Tensor | None], device: torch.device
) -> Tensor | None:
    """Return known experts [N, L, E] of the sequences' first tokens, -1 for others."""
    some = next((experts for experts in known if experts is not None and len(experts)), None)
    if some is None:
        return None
    experts_N = some.new_full((sum(lengths), *some.shape[1:]), -1)
    for experts, part in zip(known, experts_N.split(list(lengths)), strict=True):
        if experts is not None:
            part[: len(experts)] = experts
    return experts_N.to(device)


@torch.no_grad()
def _probe(runner: ModelRunner) -> tuple[float, float]:
    """Return the error of the logits of a fixed sequence, half prompt and half decoded, and its maximum."""
    prompt_of, plain_inputs = _probe_inputs(runner)
    ids, half = plain_inputs["input_ids"][0].tolist(), len(prompt_of)
    _, prompt = prefill(runner, [PromptKey((0,)), prompt_of])
    memory = KvMemory(prompt.kv, 2, len(ids))
    memory.put_prompt(prompt.kv, 0, 2)
    hidden, experts = [prompt.hidden], [] if prompt.experts is None else [prompt.experts]
    for at in range(half, len(ids)):
        token_B, length_B = torch.tensor([[ids[at]] * 2, [at] * 2], device=runner.device)
        hidden_B, experts_B = decode(runner, memory, token_B, length_B, length_B + prompt.shift)
        hidden.append(hidden_B[1])
        experts += [] if experts_B is None else [experts_B[1:].cpu()]
    packed = runner.logits(torch.stack(hidden))
    # The plain forward pass replays the experts, because rounding could change them near a tie.
    routes = runner.routes
    with routes.replay(torch.cat(experts)) if routes is not None else nullcontext():
        plain = runner.model(**plain_inputs, use_cache=False).logits[0, half - 1 :]
    # The model's dtype, because some families return float32 logits of any dtype. State layers compute in
    # float32 whatever the model's dtype is.
    dtype: torch.dtype = runner.model.dtype
    tolerance = max(_TOLERANCE.get(dtype, 5e-2), _TOLERANCE[torch.float32] if runner.seam.states else 0)
    return float((packed - plain).abs().max()), tolerance * float(plain.abs().max())


def _is_invariant(runner: ModelRunner) -> bool:
    """Return True if a sequence has equal numbers computed alone, in a batch, and decoded."""
    keys, threads = runner.token_kv.keys, torch.get_num_threads()
    if len(keys) and not attention_is_invariant(keys.shape[-1], keys.dtype, keys.device, threads):
        return False
    if not activations_are_invariant(mlp_width(runner.model), keys.dtype, keys.device, threads):
        return False
    half_of, plain_inputs = _probe_inputs(runner)
    whole_of = PromptKey.of(plain_inputs["input_ids"][0].tolist(), half_of.images)
    (whole,) = prefill(runner, [whole_of])
    *_, again, half = prefill(runner, [PromptKey((0,)), PromptKey((1, 0)), whole_of, half_of])
    memory = KvMemory(half.kv, 3, len(whole_of))
    memory.put_prompt(half.kv, 0, 2)
    for at in range(len(half_of), len(whole_of)):
        # First alone, then beside a neighbour, then beside two.
        rows = 1 + at % 3
        token_B, length_B = torch.tensor(
            [[whole_of.ids[at], *whole_of.ids[:2]], [at, 0, 1]], device=runner.device
        )
        hidden_B, _ = decode(runner, memory, token_B[:rows], length_B[:rows], length_B[:rows] + half.shift)
        half.hidden = hidden_B[0]
    half.kv = memory.prompt(0, len(whole_of))
    first = runner.logits(whole.hidden.unsqueeze(0))
    return all(
        torch.equal(whole.kv.keys, other.kv.keys)
        and torch.equal(whole.kv.values, other.kv.values)
        and all(torch.equal(x, other.kv.states[name]) for name, x in whole.kv.states.items())
        and torch.equal(first, runner.logits(other.hidden.expand(2 * ROWS, -1))[-1:])
        for other in (again, half)
    )


def _probe_inputs(runner: ModelRunner) -> tuple[PromptKey, dict[str, Tensor]]:
    """Return a prompt to probe with, and the plain model's inputs: it and a response, with an image."""
    config, ids = runner.model.config, fingerprint_ids(runner.vocab)
    half = len(ids) // 2
    if not runner.sees:
        return PromptKey(tuple(ids[:half])), {"input_ids": torch.tensor([ids], device=runner.device)}
    token, images = config.image_token_id, probe_images(config)
    ids = [0 if i == token else i for i in ids]
    ids[1:5] = [token] * 4
    inputs = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([ids]) == token}
    inputs = {name: part.to(runner.device) for name, part in (inputs | images.as_inputs()).items()}
    return PromptKey.of(ids[:half], images), inputs
