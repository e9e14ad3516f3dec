"""The fixed token sequence by which two copies of a model are compared."""

from __future__ import annotations

LENGTH = 16


def fingerprint_ids(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Token ids spread over the vocabulary, a function of its size alone; the first 16 if nothing is said.

    A model's fingerprint is the float32 logprobs [length - 1] of ids[1:], each given all ids before it,
    at temperature 1. Learner and engine compute it each by their own path.
    """
    # A multiplicative walk with an odd constant near 2^32/phi visits distant ids of any vocabulary.
    return [((i + 1) * 2_654_435_769 % 2**32) * vocab_size >> 32 for i in range(length)]
