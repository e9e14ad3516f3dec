"""The fixed token sequence by which two copies of a model are compared."""

from __future__ import annotations

LENGTH = 16


def fingerprint_ids(vocab_size: int) -> list[int]:
    """16 token ids spread over the vocabulary, a function of its size alone.

    A model's fingerprint is the float32 logprobs [15] of ids[1:], each given all ids before it,
    at temperature 1. Learner and engine compute it each by their own path.
    """
    # A multiplicative walk with an odd constant near 2^32/phi visits distant ids of any vocabulary.
    return [((i + 1) * 2_654_435_769 % 2**32) * vocab_size >> 32 for i in range(LENGTH)]
