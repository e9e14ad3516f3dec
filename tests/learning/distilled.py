"""Teachers of made-up batches, and the gradient of teaching as plain as it gets: padded rows and autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from practicum.algorithms.aggregation import token_weights
from practicum.cpu.norms import fuse_norms
from practicum.dataplane.ragged import Ragged
from practicum.learning.objective import DistillSettings
from practicum.learning.update_batch import TeacherColumns, UpdateBatch
from practicum.models.attention import OutputHead
from practicum.models.load_model import ready
from practicum.recipe.schema.teacher_sections import Distill

from .reference import VOCAB, take, tiny

TOP_K = 5
TAIL_FLOOR = 1e-6


def wide(seed: int = 0) -> PreTrainedModel:
    """A model of the same vocabulary as `tiny`, with another hidden size."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=40,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).double()
    fuse_norms(model)
    return ready(model, torch.device("cpu"))


STUDENT = tiny(seed=0)
TEACHERS = (tiny(seed=1), wide(seed=2))
OTHERS = (tiny(seed=3), wide(seed=4))


def padded(model: PreTrainedModel, batch: UpdateBatch) -> tuple[Tensor, Tensor]:
    """Last hidden states [M, H] and logits [M, V] that predict each response token, by transformers alone."""
    model.set_attn_implementation("sdpa")
    pairs = list(zip(batch.prompt_ids.rows, batch.response_ids.rows, strict=True))
    longest = max(len(p) + len(r) for p, r in pairs)
    ids_BT = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for i, (p, r) in enumerate(pairs):
        ids_BT[i, : len(p) + len(r)] = torch.cat([p, r])
        mask_BT[i, : len(p) + len(r)] = 1
    hidden_BTH = model.base_model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
    rows = [h[len(p) - 1 : len(p) + len(r) - 1] for h, (p, r) in zip(hidden_BTH, pairs, strict=True)]
    hidden_MH = torch.cat(rows)
    head = model.get_output_embeddings()
    assert head is not None
    return hidden_MH, head(hidden_MH)


def teacher_of_rows(batch: UpdateBatch) -> list[int]:
    """Sessions of one prompt have one teacher; prompts take turns."""
    return [session // 100 % 2 for session in batch.sessions]


def per_token(rows: Sequence[int], batch: UpdateBatch) -> Tensor:
    return torch.tensor(rows).repeat_interleave(torch.tensor(batch.response_ids.lengths))


@torch.no_grad()
def taught(
    batch: UpdateBatch, teachers: Sequence[PreTrainedModel] = TEACHERS, *, temperature: float = 1.0
) -> UpdateBatch:
    """The batch with all that its rows' teachers say, in double precision; groups are the teachers."""
    number_M = per_token(teacher_of_rows(batch), batch)
    said = [padded(copy.deepcopy(model), batch) for model in teachers]
    width = max(hidden_MH.shape[1] for hidden_MH, _ in said)
    logits_MV = torch.stack([logits for _, logits in said])[number_M, torch.arange(len(number_M))]
    wide_MH = torch.stack([pad(hidden, (0, width - hidden.shape[1])) for hidden, _ in said])
    hidden_MH = wide_MH[number_M, torch.arange(len(number_M))]
    all_MV = torch.log_softmax(logits_MV / temperature, -1)
    top = all_MV.topk(TOP_K, dim=-1)
    lengths = batch.response_ids.lengths
    target_M1 = batch.response_ids.values.unsqueeze(1)
    columns = TeacherColumns(
        teacher=teacher_of_rows(batch),
        logprobs=Ragged.packed(all_MV.gather(1, target_M1).squeeze(1), lengths),
        topk_ids=Ragged.packed(top.indices, lengths),
        topk_logprobs=Ragged.packed(top.values, lengths),
        hidden=Ragged.packed(hidden_MH, lengths),
    )
    return replace(batch, teachers=columns, groups=teacher_of_rows(batch))


def take_taught(batch: UpdateBatch, rows: list[int]) -> UpdateBatch:
    """Those rows in that order, with what their teachers said."""
    assert batch.teachers is not None
    given = batch.teachers
    fields = ("logprobs", "topk_ids", "topk_logprobs", "hidden")
    picked = {name: getattr(given, name).select(rows) for name in fields}
    teachers = TeacherColumns(teacher=[given.teacher[i] for i in rows], **picked)
    groups = None if batch.groups is None else [batch.groups[i] for i in rows]
    return replace(take(batch, rows), teachers=teachers, groups=groups)


def teaching(
    divergence: Any,
    signal: Any,
    *,
    temperature: float = 1.0,
    teachers: Sequence[PreTrainedModel] = TEACHERS,
    alone: bool = True,
    shares: dict[int, float] | None = None,
    **more: Any,
) -> DistillSettings:
    """How these teachers enter the update."""
    distill = Distill(divergence=divergence, signal=signal, top_k=TOP_K, **more)
    heads = [_cut(OutputHead.of(model)) for model in teachers]
    return DistillSettings(distill, temperature, heads=heads, alone=alone, shares=shares)


def _cut(head: OutputHead) -> Callable[[Tensor], Tensor]:
    return lambda hidden_MH: head.logits(hidden_MH[:, : head.weight.shape[1]])


def plain_divergence(distill: Distill, logits_MV: Tensor, batch: UpdateBatch, teacher_MV: Tensor) -> Tensor:
    """Divergence [M] of each response token by its formula; both logits are divided by the temperature."""
    p_MV, q_MV = logits_MV.log_softmax(-1), teacher_MV.log_softmax(-1)
    if distill.signal == "sampled":
        target_M1 = batch.response_ids.values.unsqueeze(1)
        return _estimate(distill.divergence, (p_MV - q_MV).gather(1, target_M1).squeeze(1))
    if distill.signal in ("top_k", "student_top_k"):  # the tokens are given: the teacher's, here
        ids_MK = teacher_MV.topk(distill.top_k, dim=-1).indices
        if distill.divergence == "unbiased_reverse_kl":
            return _with_residual(p_MV, q_MV, ids_MK, batch)
        p_MV, q_MV = (_coarse(x.gather(1, ids_MK)) for x in (p_MV, q_MV))
    return _divergence(distill, p_MV, q_MV).sum(-1)


def _with_residual(p_MV: Tensor, q_MV: Tensor, ids_MK: Tensor, batch: UpdateBatch) -> Tensor:
    """The reverse KL of the buckets, plus that of a sampled token of the tail, weighted by p / mu."""
    p_MK, q_MK = (_coarse(x.gather(1, ids_MK)) for x in (p_MV, q_MV))
    token_M1 = batch.response_ids.values.unsqueeze(1)
    p_M, q_M = (x.gather(1, token_M1).squeeze(1) for x in (p_MV, q_MV))
    sampler = batch.plain_logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
    assert sampler is not None
    weight_M = (p_M - sampler.values).exp().detach() * (ids_MK != token_M1).all(-1)
    own_M, tail_M = (p_M - q_M).detach(), (p_MK - q_MK)[:, -1].detach()
    slope_M = own_M * p_M - tail_M * p_MK[:, -1]
    value_M = own_M - tail_M
    return (p_MK.exp() * (p_MK - q_MK)).sum(-1) + weight_M * (value_M + slope_M - slope_M.detach())


def _coarse(best_MK: Tensor) -> Tensor:
    tail_M1 = (1 - best_MK.exp().sum(-1, keepdim=True)).clamp_min(TAIL_FLOOR).log()
    return torch.cat([best_MK, tail_M1], -1)


def _divergence(distill: Distill, p: Tensor, q: Tensor) -> Tensor:
    if distill.divergence == "forward_kl":
        return q.exp() * (q - p)
    if distill.divergence == "reverse_kl":
        return p.exp() * (p - q)
    beta = 0.5
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)


def _estimate(kind: str, d_M: Tensor) -> Tensor:
    k2, k3 = d_M**2 / 2, torch.exp(-d_M) - 1 + d_M
    return {
        "k2": k2,
        "k3": k3,
        "k1_straight": d_M.detach() + k2 - k2.detach(),
        "k3_straight": k3.detach() + k2 - k2.detach(),
        "abs": d_M.abs(),
        "mse": d_M**2,
    }[kind]


def plain_gradient(
    how: DistillSettings,
    batch: UpdateBatch,
    *,
    aggregation: str = "token_mean",
    teachers: Sequence[PreTrainedModel] = TEACHERS,
    only: Sequence[int] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of teaching alone; of the rows `only`, if given, in the loss of the whole batch."""
    model = copy.deepcopy(STUDENT)
    with torch.no_grad():
        said = torch.stack([padded(copy.deepcopy(t), batch)[1] for t in teachers])
    number_M = per_token(teacher_of_rows(batch), batch)
    teacher_MV = said[number_M, torch.arange(len(number_M))] / how.temperature
    logits_MV = padded(model, batch)[1] / how.temperature
    mask_M = batch.response_mask.values
    names = sorted(set(batch.sessions))
    session_M = per_token([names.index(s) for s in batch.sessions], batch)
    weights_M = token_weights(aggregation, mask_M, session_M, len(names), torch.float64)
    if how.shares is not None:
        total = weights_M.sum()
        for number, share in how.shares.items():
            mine_M = number_M == number
            weights_M[mine_M] *= share * total / weights_M[mine_M].sum()
    if only is not None:
        chosen = [int(i in set(only)) for i in range(len(batch.sessions))]
        weights_M = weights_M * per_token(chosen, batch)
    assert batch.teachers is not None
    if batch.teachers.weight is not None:
        weights_M = weights_M * batch.teachers.weight.values
    loss = (weights_M * plain_divergence(how.distill, logits_MV, batch, teacher_MV)).sum()
    loss = how.distill.weight * loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads
