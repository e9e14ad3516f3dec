"""The fixed token sequence for comparing two copies of a model."""

from __future__ import annotations

LENGTH = 16


def fingerprint_ids(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Return token ids spread over the vocabulary, which depend only on its size. The default length is 16.

    A model's fingerprint is the float32 logprobs [length - 1] of ids[1:], each given all ids before it,
    at temperature 1. Learner and engine compute it each by their own path.
    """
    # A multiplicative walk with an odd constant near 2^32/phi visits distant ids of any vocabulary.
    return [((i + 1) * 2_654_435_769 % 2**32) * vocab_size >> 32 for i in range(length)]
