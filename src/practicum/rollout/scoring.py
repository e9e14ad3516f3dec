"""Logprobs of given tokens: packed without padding, and never all tokens times the vocabulary at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from practicum.rollout.forward import Runner, pack
from practicum.rollout.kv import CausalLayout
from practicum.rollout.protocol import Scores
from practicum.rollout.queue import ScoreJob

LOGITS_AT_ONCE = 2**22


def score_batch(runner: Runner, jobs: Sequence[ScoreJob], version: int) -> list[Scores]:
    """Scores of each job, by one forward call. Each job must have at least one token to score."""
    # The last token predicts nothing that was asked for, so it is no input.
    lengths = [len(job.ids) - 1 for job in jobs]
    inputs = pack([job.ids[:-1] for job in jobs], runner.device)
    hidden_N = runner.hidden(*inputs, CausalLayout(lengths, runner.device))
    wanted_M = torch.cat([torch.arange(n) >= job.start - 1 for n, job in zip(lengths, jobs, strict=True)])
    target_M = torch.tensor([i for job in jobs for i in job.ids[job.start :]], device=runner.device)
    top_k = max(job.top_k for job in jobs)
    columns = _logprobs(runner, hidden_N[wanted_M.to(runner.device)], target_M, top_k)
    counts = [len(job.ids) - job.start for job in jobs]
    scores = []
    for job, logprobs, ids, best in zip(jobs, *(c.split(counts) for c in columns), strict=True):
        k = job.top_k
        top = (ids[:, :k].clone(), best[:, :k].clone()) if k else (None, None)
        scores.append(Scores(logprobs.clone(), *top, version))
    return scores


def empty_scores(top_k: int, version: int) -> Scores:
    """What scoring no token gives."""
    top = (torch.empty(0, top_k, dtype=torch.int64), torch.empty(0, top_k)) if top_k else (None, None)
    return Scores(torch.empty(0), *top, version)


def _logprobs(
    runner: Runner, hidden_M: Tensor, target_M: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """On the CPU: logprobs of the targets [M], ids and logprobs of the most likely tokens [M, K]."""
    logprobs, ids, best = [], [], []
    rows = max(1, LOGITS_AT_ONCE // runner.vocab)
    for hidden, target in zip(hidden_M.split(rows), target_M.split(rows), strict=True):
        logits = runner.logits(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        norm = logits.logsumexp(-1, keepdim=True)
        logprobs.append(logits.gather(-1, target.unsqueeze(-1)).sub_(norm).squeeze(-1))
        top = logits.topk(top_k, dim=-1)
        ids.append(top.indices)
        best.append(top.values - norm)
    return torch.cat(logprobs).float().cpu(), torch.cat(ids).cpu(), torch.cat(best).float().cpu()
