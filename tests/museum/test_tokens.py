"""The learner is given other tokens, or other masks, than those of the sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from practicum.engines.protocol import Counter, Generation, Sampling
from practicum.errors import CheckError
from practicum.models.tokenizer import make_tokenizer
from practicum.sessions.chat import read, tokenise
from practicum.sessions.session import EnginePolicy, Session, Trajectory

from .steps import passes, take_steps

Columns = dict[str, Tensor]
RESPONSE = ("response_ids", "response_mask", "rollout_logprobs", "plain_logprobs")


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Columns], Columns]], None]:
    """Change the columns of every row before they are written."""
    columns = Trajectory.columns

    def use(change: Callable[[Columns], Columns]) -> None:
        def changed(trajectory: Trajectory) -> Columns:
            found = columns(trajectory)
            return found | change(found)

        monkeypatch.setattr(Trajectory, "columns", changed)

    return use


def test_turns_that_are_tokenised_again(spoil: Any):
    """verl-project/verl#3720, huggingface/trl#5144, radixark/miles#353: rows were made from the text of the
    turns, which has other tokens than were sampled."""
    assert passes("agent")
    tokenizer = make_tokenizer()

    def from_text(row: Columns) -> Columns:
        text = read(tokenizer, row["response_ids"].tolist(), specials=False)
        ids = torch.tensor(tokenise(tokenizer, text), dtype=torch.int64)
        return {name: row[name][: len(ids)] for name in RESPONSE} | {"response_ids": ids}

    spoil(from_text)
    with pytest.raises(CheckError, match=r"check masks: .* its tags say"):
        take_steps("agent")


def test_a_chat_template_that_rewrites_earlier_turns(monkeypatch: pytest.MonkeyPatch):
    """modelscope/ms-swift#4390, PrimeIntellect-ai/prime-rl#1334, verl-project/verl#6854: the template leaves
    the thoughts of earlier turns out, so the engine read another conversation than the learner."""
    assert passes("agent")
    next_turn = EnginePolicy.next

    async def rewritten(
        policy: EnginePolicy, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Generation:
        shorter = Trajectory(trajectory.prompt_ids, pieces=[p for p in trajectory.pieces if not p.sampled])
        return await next_turn(policy, shorter, sampling, counter, session)

    monkeypatch.setattr(EnginePolicy, "next", rewritten)
    with pytest.raises(CheckError, match=r"check logprob_gap: rollout and learner logprobs differ"):
        take_steps("agent")


def test_merged_turns_that_are_cut_to_the_length_of_one(spoil: Any):
    """rllm-org/rllm#575: the turns of a session became one row, which was cut to the most tokens of one
    turn."""
    assert passes("agent")
    spoil(lambda row: {name: row[name][:6] for name in RESPONSE})
    with pytest.raises(CheckError, match=r"check masks: .* its tags say"):
        take_steps("agent")


def test_tokens_of_tools_that_are_learnt(spoil: Any):
    """THUDM/slime#1418, OpenRLHF/OpenRLHF#1252: what stood between the model's turns was masked or
    counted as its own."""
    assert passes("agent")
    spoil(lambda row: {"response_mask": torch.ones_like(row["response_mask"])})
    with pytest.raises(CheckError, match=r"check masks: .* sampled tokens; its tags say"):
        take_steps("agent")


def test_eos_masked_as_padding(spoil: Any):
    """huggingface/trl#6357, NVIDIA-NeMo/Megatron-Bridge#4660: padding was found by its token, which also ends
    answers: models never learnt to stop."""
    assert passes("plain")
    digits = torch.tensor(tokenise(make_tokenizer(), "0123456789"))
    spoil(lambda row: {"response_mask": row["response_mask"] & ~torch.isin(row["response_ids"], digits)})
    with pytest.raises(CheckError, match=r"check masks: .* sampled tokens; its tags say"):
        take_steps("plain")


def test_eos_appended_to_a_truncated_response(monkeypatch: pytest.MonkeyPatch):
    """OpenRLHF/OpenRLHF#238: the last token of an answer that was cut off was replaced with the EOS."""
    assert passes("plain")
    add, (end,) = Trajectory.add_sampled, tokenise(make_tokenizer(), "<eos>")

    def ended(trajectory: Trajectory, made: Generation) -> None:
        tokens = made.tokens.clone()
        tokens[-1] = end
        add(trajectory, replace(made, tokens=tokens) if made.finish == "length" else made)

    monkeypatch.setattr(Trajectory, "add_sampled", ended)
    with pytest.raises(CheckError, match=r"check logprob_gap: rollout and learner logprobs differ"):
        take_steps("plain")
