"""Score given tokens, packed without padding, and without logits of all tokens in memory.

Equal beginnings of jobs are computed once. A job's numbers are bit-identical in any batch
(`cpu/batch_invariance.py`), even with jobs of other adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from practicum.algorithms.token_logprobs import log_distribution, scaled_logits
from practicum.cpu.adapter_rows import RowPart
from practicum.cpu.batch_invariance import ROWS
from practicum.engines.protocol import ScoreOptions, Scores
from practicum.engines.torch.model_runner import ModelRunner, pack
from practicum.engines.torch.prompt_cache import PromptKey
from practicum.engines.torch.request_queue import ScoreJob
from practicum.models.packed_attention import PackedLayout
from practicum.models.token_tree import TokenRows

LOGITS_AT_ONCE = 2**22


def score_batch(runner: ModelRunner, jobs: Sequence[ScoreJob], version: int) -> list[Scores]:
    """Score jobs in one forward pass. Each must have at least one token to score."""
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].adapter)
    groups = [order]
    if runner.seam.states:  # rows of recurrent layers share one adapter
        groups = [list(group) for _, group in groupby(order, key=lambda i: jobs[i].adapter)]
    hidden: dict[int, Tensor] = {}
    for group in groups:
        hidden |= zip(group, _hidden(runner, [jobs[i] for i in group]), strict=True)
    alike: dict[tuple[ScoreOptions, int], list[int]] = {}
    for i, job in enumerate(jobs):
        support = job.request.support
        alike.setdefault((job.options, 0 if support is None else support.shape[1]), []).append(i)
    scores: dict[int, Scores] = {}
    for (options, given_width), places in alike.items():
        hidden_N = torch.cat([hidden[i] for i in places])
        target_N = torch.tensor([t for i in places for t in jobs[i].targets], device=runner.device)
        given = [x for i in places if (x := jobs[i].request.support) is not None]
        support_NK = torch.cat(given).to(runner.device) if given else None
        logprobs, ids, best = _logprobs(runner, hidden_N, target_N, options, support_NK)
        columns = [logprobs, ids, best, *([hidden_N.float().cpu()] if options.hidden else [])]
        lengths = [len(jobs[i].targets) for i in places]
        # Copied, because a view would keep the whole batch in memory.
        parts = ([part.clone() for part in column.split(lengths)] for column in columns)
        for i, (picked, top_ids, top_best, *kept) in zip(places, zip(*parts, strict=True), strict=True):
            top = (top_ids, top_best) if options.top_k or given_width else (None, None)
            scores[i] = Scores(picked, *top, version, kept[0] if kept else None)
    return [scores[i] for i in range(len(jobs))]


Prefix = tuple[str, PromptKey]
"""Key that jobs may share: an adapter, and the prefix before the tokens to score."""


def _hidden(runner: ModelRunner, jobs: Sequence[ScoreJob]) -> list[Tensor]:
    """Return hidden states [R, H] that predict the tokens of each job."""
    # The last token predicts no scored token, so it is not an input.
    tails = [tuple(job.targets[:-1]) for job in jobs]
    prefixes = [job.prefix for job in jobs]
    tokens = TokenRows(
        [np.array(prefix.ids + tail) for prefix, tail in zip(prefixes, tails, strict=True)],
        [job.adapter.encode() + b"/" + prefix.digest for job, prefix in zip(jobs, prefixes, strict=True)],
        [len(prefix) if prefix.images is not None else 0 for prefix in prefixes],
    )
    tree = tokens.tree(range(len(jobs)))
    layout = PackedLayout.of_segments(tree.segments).to(runner.device)
    inputs = pack(
        runner.model.config,
        [prefixes[i] for i in tree.order],
        runner.device,
        tree.starts,
        [tails[i] for i in tree.order],
    )
    rows = zip(tree.order, tree.starts, strict=True)
    parts = adapter_parts([(jobs[i].adapter, tokens.lengths[i] - start) for i, start in rows])
    paths = [torch.from_numpy(tree.paths[i][len(prefixes[i]) - 1 :]) for i in range(len(jobs))]
    wanted_M, places = torch.cat(paths).to(runner.device).unique(return_inverse=True)
    if runner.lean is not None:
        layout.narrow(runner.lean.layers - 1, wanted_M)
    hidden_MH = runner.hidden(inputs, layout, parts, wanted_M)
    return [hidden_MH[place] for place in places.split(list(map(len, paths)))]


def adapter_parts(rows: Sequence[tuple[str, int]]) -> list[RowPart]:
    """Return the rows of each adapter, for packed sequences with adapters and lengths."""
    parts: list[RowPart] = []
    ends = accumulate(length for _, length in rows)
    for (adapter, length), end in zip(rows, ends, strict=True):
        if parts and parts[-1].adapter == adapter:
            parts[-1] = parts[-1]._replace(stop=end)
        elif length:
            parts.append(RowPart(adapter, end - length, end))
    return [part for part in parts if part.adapter]


def empty_scores(
    runner: ModelRunner, options: ScoreOptions, version: int, support: Tensor | None = None
) -> Scores:
    """Return the scores of a sequence without tokens to score."""
    k = options.top_k if support is None else support.shape[1]
    top = (torch.empty(0, k, dtype=torch.int64), torch.empty(0, k)) if k else (None, None)
    hidden = torch.empty(0, runner.hidden_size) if options.hidden else None
    return Scores(torch.empty(0), *top, version, hidden)


def _logprobs(
    runner: ModelRunner,
    hidden_R: Tensor,
    target_R: Tensor,
    options: ScoreOptions,
    support_RK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of the targets [R], ids and logprobs of the most likely tokens [R, K], on the CPU. With
    a support, ids and logprobs are those of its tokens."""
    logprobs, ids, best = [], [], []
    rows = max(ROWS, LOGITS_AT_ONCE // runner.vocab)
    supports = [None] * -(-len(hidden_R) // rows) if support_RK is None else support_RK.split(rows)
    for hidden, target, support in zip(hidden_R.split(rows), target_R.split(rows), supports, strict=True):
        logits_RV = runner.logits(hidden)[:, : options.vocab or None]
        all_RV = log_distribution(scaled_logits(logits_RV, options.temperature))
        logprobs.append(all_RV.gather(-1, target.unsqueeze(-1)).squeeze(-1))
        top_ids = all_RV.topk(options.top_k, dim=-1).indices if support is None else support
        ids.append(top_ids)
        best.append(all_RV.gather(-1, top_ids))
    return torch.cat(logprobs).float().cpu(), torch.cat(ids).cpu(), torch.cat(best).float().cpu()
