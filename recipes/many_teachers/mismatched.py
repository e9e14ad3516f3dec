"""A teacher with another tokenizer, also at tokens that it cuts in another way."""

import torch

from practicum.parts import BatchRef, Columns, Ragged, StepInfo, stage

NO_MATCH, SHARED_TOKEN, NUMERAL = 0, 1, 4
_READ = ["rollout_logprobs", "response_mask", "teacher_logprobs", "teacher_match"]


@stage(after="pad", reads=_READ, writes=["teacher_logprobs", "teacher_match"])
def include(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Compare mismatched chunks by their logprobs; the difference is shared out evenly over the tokens.

    The teacher's logprob of a chunk stands at its last token.
    """
    student, match = columns.ragged("rollout_logprobs"), columns.ragged("teacher_match")
    scored, matched = [], []
    rows = zip(student.rows, columns.ragged("teacher_logprobs").rows, match.rows, strict=True)
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
    written = {"teacher_logprobs": torch.cat(scored), "teacher_match": torch.cat(matched)}
    return {name: Ragged.packed(values, student.lengths) for name, values in written.items()}
