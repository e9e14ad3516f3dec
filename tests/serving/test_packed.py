"""Packed scores: what goes in comes out, and nothing else is taken for scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.engines.protocol import Scores
from practicum.processes.http_client import Unusable
from practicum.teachers.prompt_logprobs import KEY, pack, read_scores
from tests.teachers.models import assert_same


@given(count=st.integers(0, 5), top_k=st.integers(0, 4), seed=st.integers(0, 99))
def test_scores_come_back_bit_for_bit(count: int, top_k: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    top = (None, None)
    if top_k:
        ids = torch.randint(0, 2**31 - 1, (count, top_k), generator=g)
        top = (ids, torch.randn(count, top_k, generator=g))
    scores = Scores(torch.randn(count, generator=g), *top, version=0)
    assert_same([read_scores({KEY: pack(scores)}, [1] * (count + 2), 2, top_k)], [scores])


GOOD = pack(Scores(torch.zeros(2), torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 3), version=0))


BROKEN = pack(Scores(torch.tensor([0.0, torch.nan]), None, None, version=0))


@pytest.mark.parametrize(
    ("packed", "top_k", "words"),
    [
        ({**GOOD, "logprobs": GOOD["topk_ids"]}, 3, "logprobs of shape"),
        ({**GOOD, "topk_ids": GOOD["logprobs"]}, 3, "topk_ids of shape"),
        ({**GOOD, "logprobs": "no base64"}, 3, "logprobs of shape"),
        ({"logprobs": GOOD["logprobs"]}, 3, "topk_ids"),
        ({}, 0, "logprobs"),
        (BROKEN, 0, "not finite"),
    ],
)
def test_arrays_that_are_not_the_scores_are_unusable(packed: Any, top_k: int, words: str):
    with pytest.raises(Unusable, match=words):
        read_scores({KEY: packed}, [1, 2, 3], 1, top_k)
