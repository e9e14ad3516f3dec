"""The variants that recipes bring as functions, against the formulas of their papers."""

import math
from statistics import fmean, stdev

import pytest
import torch

from practicum.algorithms.advantages import AdvantageInputs
from practicum.algorithms.losses import PolicyInputs
from practicum.recipe.algorithm_traits import LossTraits
from practicum.recipe.shipped import shipped_recipes
from practicum.recipe.user_functions import import_function


@pytest.fixture(scope="module")
def variants():
    """The functions of recipes/sort by name."""

    class Functions:
        def __getattr__(self, name: str):
            module = "teacher_variants" if name == "discounted_credit" else "variants"
            return import_function(f"{shipped_recipes()}/sort/{module}:{name}", "here")

    return Functions()


GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2]


def sessions(scores: list[float], **more) -> AdvantageInputs:
    """Sessions of three tokens each, the second of which a tool put in; the score is at the last one."""
    token_rewards_N = torch.zeros(3 * len(scores))
    token_rewards_N[2::3] = torch.tensor(scores)
    mask_N = torch.tensor([True, False, True] * len(scores))
    session_N = torch.arange(len(scores)).repeat_interleave(3)
    return AdvantageInputs(token_rewards_N, mask_N, session_N, torch.tensor(GROUPS), **more)


def of_sessions(advantages_N: torch.Tensor) -> list[float]:
    """The advantage of each session, which its sampled tokens share."""
    first_S, tool_S, last_S = advantages_N.view(-1, 3).T
    assert torch.equal(first_S, last_S)
    assert not tool_S.any()
    return first_S.tolist()


def test_maxrl_weighs_successes_by_the_inverse_pass_rate(variants) -> None:
    passed = [1, 0, 0, 1, 1, 0, 1, 0, 0]
    found = of_sessions(variants.maxrl(sessions([float(x) for x in passed])).advantages_N)
    for own, group, advantage in zip(passed, GROUPS, found, strict=True):
        tries = [x for x, other in zip(passed, GROUPS, strict=True) if other == group]
        # The mean score function of the successes, minus that of all tries as a control variate.
        expected = len(tries) * (own / sum(tries) - 1 / len(tries)) if sum(tries) else 0.0
        assert advantage == pytest.approx(expected, abs=1e-6)


def test_gdpo_normalises_each_reward_before_it_adds_them(variants) -> None:
    checker = [1.0, 0, 0, 1, 1, 1, 1, 0, 1]
    in_place = [1.0, 0.5, 0, 1, 0.75, 1, 0.5, math.nan, math.nan]
    parts_S = {"checker": torch.tensor(checker), "in_place": torch.tensor(in_place)}
    found = of_sessions(variants.gdpo(sessions([0.0] * 9, parts_S=parts_S)).advantages_N)
    sums = [0.0] * 9
    for weight, rewards in ((1.0, checker), (0.5, in_place)):
        for group in set(GROUPS):
            own = {i: rewards[i] for i in range(9) if GROUPS[i] == group and not math.isnan(rewards[i])}
            for i, reward in own.items():
                if len(set(own.values())) > 1:
                    sums[i] += weight * (reward - fmean(own.values())) / stdev(own.values())
    expected = [(x - fmean(sums)) / stdev(sums) for x in sums]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("judged", [False, True])
def test_discounted_credit_sums_what_comes_later_in_the_session(variants, judged: bool) -> None:
    torch.manual_seed(0)
    verdicts = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0, 1])
    inputs = sessions([0.0] * 9, gamma=0.9, parts_S={"checker": verdicts} if judged else {})
    inputs.token_rewards_N[:] = torch.randn(27)
    found = variants.discounted_credit(inputs).advantages_N
    rewards, expected = inputs.token_rewards_N.tolist(), [0.0] * 27
    for start in range(0, 27, 3):  # a step leads from sampled token to sampled token
        expected[start] = rewards[start] + 0.9 * rewards[start + 2]
        expected[start + 2] = rewards[start + 2]
    if judged:
        sampled = [i for i in range(27) if inputs.mask_N[i]]
        size = fmean(abs(expected[i]) for i in sampled)
        for i in sampled:
            verdict = 2 * float(verdicts[i // 3]) - 1
            expected[i] = expected[i] / (size + abs(expected[i])) + verdict
            assert expected[i] * verdict > 0
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_sapo_is_its_formula_with_its_gradient(variants) -> None:
    torch.manual_seed(0)
    old, advantages = (torch.randn(40, dtype=torch.float64) for _ in range(2))
    logprobs = (old + 0.5 * torch.randn(40, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(40) < 0.7
    session = torch.arange(40) // 8
    terms = variants.sapo(PolicyInputs(logprobs, old, advantages, mask, session, 0.2, 0.2))
    (gradient,) = torch.autograd.grad(terms.loss_N.sum(), logprobs)
    for i in range(40):
        tau = 1.0 if advantages[i] > 0 else 1.05
        ratio = torch.exp(logprobs[i].detach() - old[i])
        gate = 1 / (1 + torch.exp(-tau * (ratio - 1)))
        loss, slope = -gate * 4 / tau * advantages[i], -4 * gate * (1 - gate) * ratio * advantages[i]
        on = float(mask[i])
        assert float(terms.loss_N[i].detach()) == pytest.approx(on * float(loss), rel=1e-12)
        assert float(gradient[i]) == pytest.approx(on * float(slope), rel=1e-12)
        assert float(-terms.weight_N[i] * advantages[i]) == pytest.approx(on * float(slope), rel=1e-12)
    assert variants.sapo.traits == LossTraits(reads=frozenset({"entropy"}))


def test_sapo_is_the_plain_policy_gradient_where_the_policy_sampled(variants) -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -3.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    inputs = PolicyInputs(logprobs, logprobs.detach(), advantages, mask, torch.zeros(2).long(), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(variants.sapo(inputs).loss_N.sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages)
