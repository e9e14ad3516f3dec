"""Teachers that teach nothing, or something else than the student said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from practicum.engines.protocol import Scores
from practicum.engines.torch import score_batch
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import CheckError, RecipeErrors, TeacherError
from practicum.learning.objective import DistillResult, DistillSettings
from practicum.models.tokenizer import make_tokenizer
from practicum.teachers.vocabulary import compare_vocabularies
from practicum.trainer.check_data import tokenizer_problems

from ..sessions.sessions import byte_tokenizer
from ..teachers.test_check import tokenizer_of
from ..trainer.recipes import tiny
from .steps import passes, recipe_of, take_steps


def test_a_divergence_without_a_gradient(monkeypatch: pytest.MonkeyPatch):
    """NousResearch/atropos#464: what teachers said was collected and then left out of the loss."""
    assert passes("taught")
    token_losses = DistillSettings.token_losses

    def detached(*args: Any) -> DistillResult:
        found = token_losses(*args)
        assert found.loss_M is not None
        return replace(found, loss_M=found.loss_M.detach())

    monkeypatch.setattr(DistillSettings, "token_losses", detached)
    with pytest.raises(CheckError, match=r"the divergence from the teachers has no gradient"):
        take_steps("taught")


def test_scores_of_the_token_before(monkeypatch: pytest.MonkeyPatch):
    """modelscope/ms-swift#8436: a teacher's logits were not moved by the one token by which they predict."""
    assert passes("taught")
    score = TorchEngine.score

    async def unshifted(*args: Any) -> Scores:
        found = await score(*args)
        return replace(found, logprobs=found.logprobs.roll(1))

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "score", unshifted)
        with pytest.raises(TeacherError, match=r"teacher t returned inconsistent logprobs for token"):
            take_steps("taught")
    hidden = score_batch._hidden
    monkeypatch.setattr(score_batch, "_hidden", lambda *args: [one.roll(1, 0) for one in hidden(*args)])
    with pytest.raises(CheckError, match=r"check fingerprint: "):  # the student's engine scores by it too
        take_steps("taught")


def test_a_teacher_with_other_tokens():
    """huggingface/trl#4562: a teacher with another tokenizer was given the student's token ids, which are
    other text to it."""
    student = tokenizer_of("abcdef")
    assert not compare_vocabularies(student, tokenizer_of("abcdef"), "t", chat=False)
    (problem,) = compare_vocabularies(student, tokenizer_of("bacdef"), "t", chat=False)
    assert "teachers.t.model: found a vocabulary of 9 tokens that differs" in str(problem)
    assert "2 have other ids ('a' is 3 here, 4 there" in str(problem)


def test_a_teacher_with_another_end():
    """huggingface/open-r1#663, Blaizzy/mlx-vlm#2112: tokenizer and generation config named different ends,
    and answers went on to the last token that was allowed."""
    problems = compare_vocabularies(make_tokenizer(), tokenizer_with_end("<pad>"), "t", chat=False)
    assert "the EOS token '<pad>', where the student has '<eos>'" in str(problems[0])
    chatml, recipe = byte_tokenizer("chatml"), recipe_of("plain")
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"stop": []})})
    assert not list(tokenizer_problems(recipe, chatml, None, uses_chat=True))
    chatml.eos_token = "<|begin_of_text|>"
    (problem,) = tokenizer_problems(recipe, chatml, None, uses_chat=True)
    assert "rollout.stop: found a chat template that ends turns with <|im_end|>" in str(problem)


def tokenizer_with_end(end: str) -> Any:
    """The made models' tokenizer with another token as its end."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = end
    return tokenizer


def test_a_divergence_whose_gradient_does_not_know_the_teacher(tmp_path: Path):
    """huggingface/trl#4967, OpenRLHF/OpenRLHF#1101: the log-ratio itself as a loss pulls at no token more
    than at another, whatever the teacher says."""
    taught = {"teachers": {"t": {"student": {}}}, "reward": {"weight": 0.0}}
    sampled = {"divergence": "k1", "signal": "sampled"}
    assert tiny(tmp_path, **taught, distill=sampled | {"apply_as": "advantage"})
    with pytest.raises(RecipeErrors, match=r"distill.divergence: found k1"):
        tiny(tmp_path, **taught, distill=sampled | {"apply_as": "loss"})
