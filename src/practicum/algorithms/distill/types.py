"""What divergences take and give."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DistillTerms:
    """Divergence of each token, and where the clamp bit (bool): such a token has no gradient.

    `entropy_gap_N`, the student's entropy minus the teacher's over the buckets compared, without gradient;
    None if the signal does not tell.
    """

    loss_N: Tensor
    clamped_N: Tensor
    entropy_gap_N: Tensor | None = None


@dataclass(frozen=True)
class Buckets:
    """Two distributions over the same buckets (last dimension): tokens, or a teacher's top-k and its tail.

    `p` is the student, `q` the teacher, `log_ratio` = log p - log q, and `beta` the teacher's weight in jsd's
    mixture. `log_ratio` is finite; `p` and `q` may underflow to 0.
    """

    log_ratio: Tensor
    p: Tensor
    q: Tensor
    beta: float = 0.5


@dataclass(frozen=True)
class BucketTerms:
    """A divergence bucket by bucket: its value (>= 0, with the divergence as sum), and p d(value)/dp.

    Both are exactly 0 where the log-ratio is, and finite where the divergence is.
    """

    value: Tensor
    pull: Tensor
