"""Tiny models, made-up batches, and an update as plain as it gets: padded rows, one forward, one backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from practicum.algorithms.aggregation import token_weights
from practicum.algorithms.kl import token_kl
from practicum.algorithms.losses import POLICY_LOSSES, PolicyInputs
from practicum.cpu.norms import fuse_norms
from practicum.dataplane.ragged import Ragged
from practicum.learning.update_batch import UpdateBatch
from practicum.models.load_model import ready
from practicum.models.lora import add_adapter
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Lora, Train
from tests.learning.optimizers import STEADY_EPS

FAMILIES = ("qwen3", "llama", "gpt2")
VOCAB = 19


def tiny(family: str = "qwen3", dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A two-layer model with weights large enough for attention to matter."""
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
        )
    else:
        kind = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}[family]
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        config = kind(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.3,
            tie_word_embeddings=family == "qwen3",
            **(experts if family == "qwen3_moe" else {}),
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    # transformers' own norms round double precision to single; tests/models/test_norms.py compares them.
    fuse_norms(model)
    return ready(model, torch.device("cpu"))


def adapted(
    family: str = "qwen3",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    *,
    fresh: bool = False,
    **lora: Any,
) -> PreTrainedModel:
    """The tiny model with an adapter that has learnt something already, unless it is to be `fresh`."""
    return with_adapter(tiny(family, dtype, seed), fresh=fresh, **lora)


def with_adapter(model: PreTrainedModel, *, fresh: bool = False, **lora: Any) -> PreTrainedModel:
    """This model with such an adapter."""
    add_adapter(model, Lora(**({"rank": 4, "alpha": 4.0} | lora)), seed=1)
    g = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if not fresh and ".lora_B." in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=g).to(parameter.dtype)
    return model.eval()


def random_batch(
    seed: int, *, groups: int = 3, samples: int = 3, flat_groups: int = 0, all_columns: bool = True
) -> UpdateBatch:
    """Groups of sessions with shared prompts, of one to two rows each; some rows without tokens. Tokens of
    tools are masked; the first `flat_groups` groups have no advantage."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    def ids(n: int) -> Tensor:
        return torch.randint(0, VOCAB, (n,), generator=g)

    prompts, responses, masks, sessions, advantages = [], [], [], [], []
    for group in range(groups):
        prompt = ids(draw(1, 7))
        for sample in range(samples):
            advantage = 0.0 if group < flat_groups else float(torch.randn((), generator=g))
            context = prompt
            for _ in range(draw(1, 2)):
                length = draw(0, 9)
                prompts.append(context)
                responses.append(ids(length))
                masks.append(torch.rand(length, generator=g) < 0.8)
                sessions.append(100 * group + sample)
                advantages.append(torch.full((length,), advantage))
                context = torch.cat([context, responses[-1], ids(2)])
    if not any(bool(mask.any()) for mask in masks):
        return random_batch(seed + 1000, groups=groups, samples=samples, flat_groups=flat_groups)

    def logprobs() -> Ragged | None:
        rows = [-3 * torch.rand(len(r), generator=g) for r in responses]
        return Ragged.from_rows(rows) if all_columns else None

    return UpdateBatch(
        prompt_ids=Ragged.from_rows(prompts),
        response_ids=Ragged.from_rows(responses),
        response_mask=Ragged.from_rows(masks),
        sessions=sessions,
        advantages=Ragged.from_rows(advantages),
        old_logprobs=logprobs(),
        plain_logprobs=logprobs(),
        ref_logprobs=logprobs(),
    )


def with_shared_beginnings(batch: UpdateBatch) -> UpdateBatch:
    """The same rows, but responses begin like the one before them, many of them by all that fits."""
    responses = [row.clone() for row in batch.response_ids.rows]
    for i, (before, row) in enumerate(pairwise(responses)):
        count = min(len(before), len(row), (3 * i) % 11)
        row[:count] = before[:count]
    return replace(batch, response_ids=Ragged.from_rows(responses))


def take(batch: UpdateBatch, rows: list[int]) -> UpdateBatch:
    """Those rows in that order."""
    columns = {
        name: getattr(batch, name).select(rows)
        for name in batch.__slots__
        if isinstance(getattr(batch, name), Ragged)
    }
    numbers = {
        name: [getattr(batch, name)[i] for i in rows]
        for name in ("sessions", "session_tokens", "groups")
        if getattr(batch, name) is not None
    }
    extras = None if batch.extras is None else batch.extras.select(rows)
    return replace(batch, **columns, **numbers, extras=extras)


def with_padding(batch: UpdateBatch, places: Sequence[int]) -> UpdateBatch:
    """The batch with a padding row before each of these rows, or behind the last: no token is sampled."""
    order = sorted([*range(len(batch.sessions)), *(place - 0.5 for place in places)])

    def padded(rows: Sequence[Any], padding: Any) -> list[Any]:
        return [rows[int(i)] if i == int(i) else padding for i in order]

    def column(name: str, value: Ragged) -> Ragged:
        tokens = 2 if name in ("position_ids", "routed_experts") else 1
        return Ragged.from_rows(padded(value.rows, value.values.new_zeros(tokens, *value.trailing)))

    def columns(of: Any) -> dict[str, Ragged]:
        found = {f.name: getattr(of, f.name) for f in fields(of)}
        return {name: column(name, value) for name, value in found.items() if isinstance(value, Ragged)}

    extras, teachers = batch.extras, batch.teachers
    if extras is not None:
        images = None if extras.images is None else padded(extras.images, None)
        extras = replace(extras, **columns(extras), images=images)
    if teachers is not None:
        teachers = replace(teachers, **columns(teachers), teacher=padded(teachers.teacher, 0))
    numbers = {"sessions": -1, "session_tokens": 0, "groups": 0}
    given = {name: padding for name, padding in numbers.items() if getattr(batch, name) is not None}
    lists = {name: padded(getattr(batch, name), padding) for name, padding in given.items()}
    return replace(batch, **columns(batch), **lists, extras=extras, teachers=teachers)


@dataclass
class Tokens:
    """Per response token, packed in row order."""

    logprobs: Tensor
    entropy: Tensor
    plain: Tensor


def padded_tokens(model: PreTrainedModel, batch: UpdateBatch, temperature: float) -> Tokens:
    """By transformers' own padded forward, all rows at once, all logits held."""
    model.set_attn_implementation("sdpa")
    pairs = list(zip(batch.prompt_ids.rows, batch.response_ids.rows, strict=True))
    longest = max(len(p) + len(r) for p, r in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (p, r) in enumerate(pairs):
        ids[i, : len(p) + len(r)] = torch.cat([p, r])
        mask[i, : len(p) + len(r)] = 1
    logits = model(input_ids=ids, attention_mask=mask).logits
    found: list[list[Tensor]] = [[], [], []]
    for i, (p, r) in enumerate(pairs):
        row = logits[i, len(p) - 1 : len(p) + len(r) - 1]
        scaled = torch.log_softmax(row / temperature, -1)
        found[0].append(scaled.gather(1, r[:, None])[:, 0])
        found[1].append(-(scaled.exp() * scaled).sum(-1))
        found[2].append(torch.log_softmax(row, -1).gather(1, r[:, None])[:, 0])
    return Tokens(*(torch.cat(parts) for parts in found))


@dataclass
class Updated:
    """What an update did."""

    loss: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference_update(
    model: PreTrainedModel, batch: UpdateBatch, train: Train, algorithm: Algorithm, temperature: float = 1.0
) -> Updated:
    """The same update on a copy of the model; gradients are after clipping."""
    model = copy.deepcopy(model)
    dtype = model.dtype
    tokens = padded_tokens(model, batch, temperature)
    mask = batch.response_mask.values
    names = sorted(set(batch.sessions))
    rows = torch.tensor([names.index(s) for s in batch.sessions])
    session = rows.repeat_interleave(torch.tensor(batch.response_ids.lengths))
    if algorithm.loss == "supervised":
        loss = -tokens.logprobs
    else:
        assert batch.advantages is not None
        old = batch.old_logprobs
        inputs = PolicyInputs(
            logprobs_N=tokens.logprobs,
            old_logprobs_N=tokens.logprobs.detach() if old is None else old.values.to(dtype),
            advantages_N=batch.advantages.values.to(dtype),
            mask_N=mask,
            session_N=session,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        loss = POLICY_LOSSES[algorithm.loss](inputs).loss_N
    loss = loss - algorithm.entropy * tokens.entropy
    if algorithm.kl.place == "loss":
        assert batch.ref_logprobs is not None
        kl = token_kl(algorithm.kl.estimator, tokens.logprobs, batch.ref_logprobs.values.to(dtype), mask)
        loss = loss + algorithm.kl.coefficient * kl
    weights = token_weights(algorithm.aggregation, mask, session, len(names), dtype)
    total = (weights * loss).sum()
    total.backward()
    if train.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=train.lr,
        betas=train.betas,
        eps=1e-8 if train.optimizer == "adamw" else STEADY_EPS,
        foreach=False,
    ).step()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Updated(float(total.detach()), grads, {n: p.detach() for n, p in model.named_parameters()})
