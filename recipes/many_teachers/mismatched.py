"""A teacher with another tokenizer by sampled tokens: without or with tokens that it cuts in another way.

Compared tokens are pushed down where the student is surer than the teacher, as it is on average, and the end
token is not compared: answers would shrink. So both shift the teacher's logprobs by the mean difference.
"""

import torch

from practicum.parts import BatchRef, Columns, Ragged, StepInfo, stage

NO_MATCH, SHARED_TOKEN, NUMERAL = 0, 1, 4
_READ = ["rollout_logprobs", "response_mask", "teacher_logprobs", "teacher_match"]
_WRITTEN = ["teacher_logprobs", "teacher_match"]


@stage(after="pad", reads=_READ, writes=_WRITTEN)
def leave_out(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Compare strict positions alone."""
    return centred(columns, *(columns.ragged(name).values for name in ("teacher_logprobs", "teacher_match")))


@stage(after="pad", reads=_READ, writes=_WRITTEN)
def include(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Compare mismatched chunks by their logprobs; the difference is shared out evenly over the tokens.

    The teacher's logprob of a chunk stands at its last token.
    """
    scored, matched = [], []
    rows = zip(*(columns.ragged(name).rows for name in _READ if name != "response_mask"), strict=True)
    for own_R, teacher_R, match_R in rows:
        teacher_R, match_R, start = teacher_R.clone(), match_R % NUMERAL, 0
        for place, (logprob, kind) in enumerate(zip(teacher_R.tolist(), match_R.tolist(), strict=True)):
            if kind == NO_MATCH and logprob < 0:
                chunk = slice(start, place + 1)
                teacher_R[chunk] = own_R[chunk] + (logprob - own_R[chunk].sum()) / (place + 1 - start)
                match_R[chunk] = SHARED_TOKEN
            if kind != NO_MATCH or logprob < 0:
                start = place + 1
        scored.append(teacher_R)
        matched.append(match_R)
    return centred(columns, torch.cat(scored), torch.cat(matched))


def centred(columns: Columns, teacher_N: torch.Tensor, match_N: torch.Tensor) -> dict[str, Ragged]:
    """Return these columns, with logprobs that agree with the student's on average over compared tokens."""
    student = columns.ragged("rollout_logprobs")
    compared_N = columns.ragged("response_mask").values & (match_N % NUMERAL != NO_MATCH)
    apart_N = (student.values - teacher_N)[compared_N]
    shifted_N = teacher_N + (apart_N.mean() if len(apart_N) else 0.0)
    written = {"teacher_logprobs": shifted_N, "teacher_match": match_N}
    return {name: Ragged.packed(values, student.lengths) for name, values in written.items()}
