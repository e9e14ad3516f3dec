"""Logprobs of given tokens: packed without padding, and never all tokens times the vocabulary at once.

A job's numbers are the same, bit for bit, whatever else is in its batch: attention sees a sequence padded by
its own length alone, and matrices have at least FEWEST_TOKENS rows, because those with fewer take other ways
through the linear algebra libraries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from practicum.rollout.forward import Runner, pack
from practicum.rollout.kv import CausalLayout
from practicum.rollout.protocol import Scores
from practicum.rollout.queue import ScoreJob

LOGITS_AT_ONCE = 2**22
FEWEST_TOKENS = 256


def score_batch(runner: Runner, jobs: Sequence[ScoreJob], version: int) -> list[Scores]:
    """Scores of each job, by one forward call. Each job must have at least one token to score."""
    # The last token predicts nothing that was asked for, so it is no input.
    inputs = [job.ids[:-1] for job in jobs]
    lengths = [len(ids) for ids in inputs]
    wanted = [torch.arange(n) >= job.start - 1 for n, job in zip(lengths, jobs, strict=True)]
    if (lacking := FEWEST_TOKENS - sum(lengths)) > 0:
        inputs = [*inputs, *_filling(inputs[0], lacking)]
        lengths = [len(ids) for ids in inputs]
        wanted.append(torch.zeros(sum(lengths[len(jobs) :]), dtype=torch.bool))
    layout = CausalLayout(lengths, runner.device)
    hidden_N = runner.hidden(*pack(inputs, runner.device), layout)
    hidden_M = hidden_N[torch.cat(wanted).to(runner.device)]
    counts = [len(job.ids) - job.start for job in jobs]
    scores = []
    for job, hidden_R in zip(jobs, hidden_M.split(counts), strict=True):
        target_R = torch.tensor(job.ids[job.start :], device=runner.device)
        logprobs, ids, best = _logprobs(runner, hidden_R, target_R, job)
        top = (ids, best) if job.top_k else (None, None)
        kept = hidden_R.float().cpu() if job.hidden else None
        scores.append(Scores(logprobs, *top, version, kept))
    return scores


def empty_scores(runner: Runner, job: ScoreJob, version: int) -> Scores:
    """What scoring no token gives."""
    k = job.top_k
    top = (torch.empty(0, k, dtype=torch.int64), torch.empty(0, k)) if k else (None, None)
    hidden = torch.empty(0, runner.hidden_size) if job.hidden else None
    return Scores(torch.empty(0), *top, version, hidden)


def _filling(ids: Sequence[int], lacking: int) -> list[Sequence[int]]:
    """Copies of a sequence with at least this many tokens in all."""
    return [ids] * -(-lacking // len(ids))


def _logprobs(
    runner: Runner, hidden_R: Tensor, target_R: Tensor, job: ScoreJob
) -> tuple[Tensor, Tensor, Tensor]:
    """On the CPU: logprobs of the targets [R], ids and logprobs of the most likely tokens [R, K]."""
    logprobs, ids, best = [], [], []
    rows = max(1, LOGITS_AT_ONCE // runner.vocab)
    for hidden, target in zip(hidden_R.split(rows), target_R.split(rows), strict=True):
        logits = runner.logits(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits if job.temperature == 1.0 else logits / job.temperature
        norm = logits.logsumexp(-1, keepdim=True)
        logprobs.append(logits.gather(-1, target.unsqueeze(-1)).sub_(norm).squeeze(-1))
        top = logits.topk(job.top_k, dim=-1)
        ids.append(top.indices)
        best.append(top.values - norm)
    return torch.cat(logprobs).float().cpu(), torch.cat(ids).cpu(), torch.cat(best).float().cpu()
