"""Logprobs of given tokens: packed without padding, and never all tokens times the vocabulary at once.

What comes before the scored tokens is computed once for all jobs that share it. A job's numbers are the same,
bit for bit, whatever else is in its batch (`models/batch_invariance.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from practicum.algorithms.token_logprobs import log_distribution, scaled_logits
from practicum.engines.protocol import ScoreOptions, Scores
from practicum.engines.torch.model_runner import ModelRunner, pack
from practicum.engines.torch.prompt_cache import PromptKey
from practicum.engines.torch.request_queue import ScoreJob
from practicum.models.batch_invariance import ROWS
from practicum.models.packed_attention import PackedLayout

LOGITS_AT_ONCE = 2**22


def score_batch(runner: ModelRunner, jobs: Sequence[ScoreJob], version: int) -> list[Scores]:
    """Scores of each job, by one forward call. Each job must have at least one token to score."""
    scores = []
    for job, hidden_R in zip(jobs, _hidden(runner, jobs), strict=True):
        target_R = torch.tensor(job.targets, device=runner.device)
        logprobs, ids, best = _logprobs(runner, hidden_R, target_R, job.options)
        top = (ids, best) if job.options.top_k else (None, None)
        kept = hidden_R.float().cpu() if job.options.hidden else None
        scores.append(Scores(logprobs, *top, version, kept))
    return scores


def cost(job: ScoreJob, seen: set[PromptKey]) -> int:
    """Tokens that a job adds to a batch that has computed the prefixes in `seen`; notes its own there."""
    prefix = job.prefix
    more = 0 if prefix in seen else len(prefix)
    seen.add(prefix)
    return more + len(job.targets) - 1


def _hidden(runner: ModelRunner, jobs: Sequence[ScoreJob]) -> list[Tensor]:
    """Hidden states [R, H] that predict the tokens of each job."""
    numbers: dict[PromptKey, int] = {}
    parents = [numbers.setdefault(job.prefix, len(numbers)) for job in jobs]
    # The last token predicts nothing that was asked for, so it is no input.
    tails = [job.targets[:-1] for job in jobs]
    prefixes = list(numbers)
    lengths = [len(prefix) for prefix in prefixes]
    continuations = [(parent, len(tail)) for parent, tail in zip(parents, tails, strict=True) if tail]
    layout = PackedLayout.of_sequences(lengths, continuations).to(runner.device)
    hidden_N = runner.hidden(pack(runner.model.config, prefixes, runner.device, tails, parents), layout)
    last = torch.tensor(lengths, device=runner.device).cumsum(0) - 1
    first_BH = hidden_N[last[parents]]
    parts = hidden_N[sum(lengths) :].split([len(tail) for tail in tails])
    return [torch.cat([first.unsqueeze(0), part]) for first, part in zip(first_BH, parts, strict=True)]


def empty_scores(runner: ModelRunner, options: ScoreOptions, version: int) -> Scores:
    """Scores of a sequence without tokens to score."""
    k = options.top_k
    top = (torch.empty(0, k, dtype=torch.int64), torch.empty(0, k)) if k else (None, None)
    hidden = torch.empty(0, runner.hidden_size) if options.hidden else None
    return Scores(torch.empty(0), *top, version, hidden)


def _logprobs(
    runner: ModelRunner, hidden_R: Tensor, target_R: Tensor, options: ScoreOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """On the CPU: logprobs of the targets [R], ids and logprobs of the most likely tokens [R, K]."""
    logprobs, ids, best = [], [], []
    rows = max(ROWS, LOGITS_AT_ONCE // runner.vocab)
    for hidden, target in zip(hidden_R.split(rows), target_R.split(rows), strict=True):
        logits_RV = runner.logits(hidden)[:, : options.vocab or None]
        all_RV = log_distribution(scaled_logits(logits_RV, options.temperature))
        logprobs.append(all_RV.gather(-1, target.unsqueeze(-1)).squeeze(-1))
        top = all_RV.topk(options.top_k, dim=-1)
        ids.append(top.indices)
        best.append(top.values)
    return torch.cat(logprobs).float().cpu(), torch.cat(ids).cpu(), torch.cat(best).float().cpu()
