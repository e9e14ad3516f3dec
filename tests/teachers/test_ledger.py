"""What each teacher and each domain had, against tables worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.learning.update_batch import TeacherSums
from practicum.learning.update_shares import PartShares
from practicum.observe.text import update_rest
from practicum.teachers.ledger import Ledger, Pair, TeacherMeasures, make_ledger, pair_of, totals


def tags(teacher: str, domain: str, tokens: int, reward: float | None = None) -> Tags:
    return Tags(teacher=teacher, domain=domain, sampled_tokens=tokens, reward=reward)


BATCH = BatchRef(
    "train",
    (Key(0, 0), Key(0, 1), Key(0, 1, 1), Key(1, 0), Key(2, 0)),
    (
        tags("math", "sums", 4, 1.0),
        tags("math", "sums", 2, 0.0),
        tags("math", "sums", 2, 0.0),  # the second trajectory of a session: its reward counts once
        tags("math", "logic", 8, 0.5),
        tags("code", "logic", 4),
    ),
)
PAIRS = [("math", "sums"), ("math", "logic"), ("code", "logic")]


def sums() -> TeacherSums:
    """Of the batch's 20 tokens, with weight 1/20 each and made-up numbers."""
    made = TeacherSums()
    group_M = torch.tensor([0] * 8 + [1] * 8 + [2] * 4)
    each = torch.tensor([1.0, 2.0, 5.0])
    loss_M = each[group_M] / 20
    weight_M = torch.full((20,), 0.05)
    made.add(group_M[:11], weight=weight_M[:11], loss=loss_M[:11], kl=each[group_M[:11]])
    made.add(group_M[11:], weight=weight_M[11:], loss=loss_M[11:], kl=each[group_M[11:]])
    return made


GRAM = [[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 1.0]]
"""Of the pairs' gradients: their squares are 9 and 1 by teacher, 4 and 5 by domain."""


def made(gram: list[list[float]] | None = None, parts: list[Pair] = PAIRS, shares: Any = ()) -> Ledger:
    rest = {"momentum": 0.5, "decay": -0.1, "clipping": 0.0} if shares else {}
    found = None if gram is None else PartShares(gram, list(shares), rest)
    measured = TeacherMeasures(PAIRS, sums(), parts, found)
    return make_ledger(BATCH, measured, {"math": 1.5, "code": 0.5}, {"math": 1})


def table(gram: list[list[float]] | None = None, parts: list[Pair] = PAIRS, shares: Any = ()) -> Any:
    return made(gram, parts, shares).metrics()


def norms(math: float, code: float) -> list[list[float]]:
    """Gradients of these norms that have nothing to do with each other."""
    return [[math**2, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, code**2]]


def test_the_table_of_a_step():
    got = table(GRAM, shares=[0.4, -0.1, 0.3])
    assert {name: v for name, v in got.items() if name.startswith(("update/", "cosine/"))} == {
        "update/momentum": 0.5,
        "update/decay": -0.1,
        "update/clipping": 0.0,
        "cosine/code/math": pytest.approx(0.5 / 3),
    }
    assert {name: v for name, v in got.items() if name.startswith("teacher/math/")} == {
        "teacher/math/update_share": pytest.approx(0.3),
        "teacher/math/prompts": 2,
        "teacher/math/prompts_share": pytest.approx(2 / 3),
        "teacher/math/tokens": 16,
        "teacher/math/tokens_share": 0.8,
        "teacher/math/reward": pytest.approx((1.0 + 0.0 + 0.5) / 3),
        "teacher/math/kl": pytest.approx((8 * 1 + 8 * 2) / 16),
        "teacher/math/loss": pytest.approx((8 * 1 + 8 * 2) / 16),
        "teacher/math/loss_share": pytest.approx(0.8),
        "teacher/math/gradient_share": 0.75,
        "teacher/math/seconds": 1.5,
        "teacher/math/wakes": 1,
    }
    assert {name: v for name, v in got.items() if name.startswith("teacher/code/")} == {
        "teacher/code/update_share": 0.3,
        "teacher/code/prompts": 1,
        "teacher/code/prompts_share": pytest.approx(1 / 3),
        "teacher/code/tokens": 4,
        "teacher/code/tokens_share": 0.2,
        "teacher/code/kl": pytest.approx(5.0),
        "teacher/code/loss": pytest.approx(5.0),
        "teacher/code/loss_share": pytest.approx(0.2),
        "teacher/code/gradient_share": 0.25,
        "teacher/code/seconds": 0.5,
    }
    assert {name: v for name, v in got.items() if name.startswith("domain/logic/")} == {
        "domain/logic/prompts": 2,
        "domain/logic/prompts_share": pytest.approx(2 / 3),
        "domain/logic/tokens": 12,
        "domain/logic/tokens_share": 0.6,
        "domain/logic/reward": 0.5,
        "domain/logic/kl": pytest.approx((8 * 2 + 4 * 5) / 12),
        "domain/logic/loss": pytest.approx((8 * 2 + 4 * 5) / 12),
        "domain/logic/loss_share": pytest.approx(0.6),
        "domain/logic/gradient_share": pytest.approx(5**0.5 / (5**0.5 + 2)),
        "domain/logic/update_share": pytest.approx(0.2),
    }


def test_gradients_that_were_not_measured_have_no_share():
    assert not [name for name in table() if name.endswith("gradient_share")]


def test_a_name_without_rows_in_the_measured_minibatch_has_no_share():
    got = table([row[:2] for row in GRAM[:2]], PAIRS[:2])
    assert got["teacher/math/gradient_share"] == 1.0
    assert "teacher/code/gradient_share" not in got


def test_rows_without_sampled_tokens_are_counted_as_prompts_and_have_no_loss():
    batch = BatchRef("train", (Key(0), Key(1)), (tags("math", "sums", 0), tags("code", "logic", 4)))
    made = TeacherSums()
    made.add(torch.tensor([1, 1, 1, 1]), weight=torch.full((4,), 0.25), loss=torch.ones(4))
    got = make_ledger(batch, TeacherMeasures([pair_of(t) for t in batch.tags], made), {}, {}).metrics()
    assert got["teacher/math/prompts"] == 1
    assert got["teacher/math/tokens"] == got["teacher/math/tokens_share"] == 0
    assert "teacher/math/loss" not in got
    assert got["teacher/code/loss_share"] == 1.0


def test_a_starved_teacher_is_named_with_its_target():
    ledger = made(norms(97.0, 3.0))
    sentence = ledger.starved(None)
    assert sentence is not None
    assert "code has 3.0% of the gradient, and its target is 33.3%" in sentence
    assert "math" not in sentence
    assert "route.shares" in sentence


def test_a_target_of_the_recipe_goes_before_the_share_of_prompts():
    ledger = made(norms(97.0, 3.0))
    assert ledger.starved({"math": 0.8, "code": 0.2}) is None
    sentence = ledger.starved({"math": 0.5, "code": 0.5})
    assert sentence is not None
    assert "code has 3.0% of the gradient, and its target is 50.0%" in sentence


def test_a_tenth_of_the_target_is_enough():
    assert made(norms(95.0, 5.0)).starved({"math": 0.5, "code": 0.5}) is None


def test_a_run_adds_counts_and_takes_means_of_the_rest():
    steps = [
        {"step": 1, "teacher/math/prompts": 3, "teacher/math/tokens": 10, "teacher/math/loss": 1.0},
        {
            "step": 2,
            "time/step": 3.0,
            "teachers/overlap_fraction": 0.5,
            "teacher/math/prompts": 1,
            "teacher/math/tokens": 20,
            "teacher/math/loss": 3.0,
            "teacher/math/gradient_share": 0.25,
            "teacher/code/prompts": 4,
            "teacher/code/tokens": 30,
            "teacher/code/loss": 7.0,
            "domain/logic/prompts": 5,
            "domain/logic/tokens": 60,
        },
    ]
    assert totals(steps) == {
        "teacher code": {"prompts": 4, "tokens": 30, "loss": 7.0, "prompts_share": 0.5, "tokens_share": 0.5},
        "teacher math": {
            "prompts": 4,
            "tokens": 30,
            "loss": 2.0,
            "gradient_share": 0.25,
            "prompts_share": 0.5,
            "tokens_share": 0.5,
        },
        "domain logic": {"prompts": 5, "tokens": 60, "prompts_share": 1.0, "tokens_share": 1.0},
    }
    assert list(totals(steps)) == ["teacher code", "teacher math", "domain logic"]
    assert totals([{"step": 1, "reward/mean": 0.5}]) == {}


def test_shares_of_a_run_are_of_its_counts_not_means_of_the_steps_shares():
    steps = [
        {f"teacher/{name}/{what}": value for name, value in counts.items() for what in ("prompts", "tokens")}
        | {f"teacher/{name}/prompts_share": 0.5 for name in counts}
        for counts in ({"math": 1, "code": 9}, {"math": 2, "code": 8})
    ]
    assert totals(steps)["teacher math"]["prompts_share"] == pytest.approx(3 / 20)


def test_shares_of_the_loss_add_up_to_one_when_steps_have_different_teachers():
    shares = [{"math": 1.0}, {"math": 0.5, "code": 0.5}, {"code": 0.25, "chat": 0.75}, {}]
    steps = []
    for step in shares:
        row = {"step": float(len(steps))}
        for name, share in step.items():
            row |= {f"teacher/{name}/prompts": 1, f"teacher/{name}/tokens": 2}
            row |= {f"teacher/{name}/loss_share": share, f"domain/d {name}/loss_share": share}
            row |= {f"domain/d {name}/prompts": 1, f"domain/d {name}/tokens": 2}
        steps.append(row)
    lines = totals(steps)
    for kind in ("teacher ", "domain "):
        mine = {name: line["loss_share"] for name, line in lines.items() if name.startswith(kind)}
        assert sum(mine.values()) == pytest.approx(1.0)
    assert lines["teacher math"]["loss_share"] == pytest.approx(0.5)
    assert lines["teacher chat"]["loss_share"] == pytest.approx(0.25)


def test_domains_may_have_a_slash_in_their_name():
    batch = BatchRef("train", (Key(0),), (tags("math", "sums/hard", 4, 1.0),))
    made = TeacherSums()
    made.add(torch.zeros(4, dtype=torch.int64), weight=torch.full((4,), 0.25), loss=torch.ones(4))
    measured = TeacherMeasures(
        [("math", "sums/hard")], made, [("math", "sums/hard")], PartShares([[1.0]], [], {})
    )
    ledger = make_ledger(batch, measured, {}, {})
    got = ledger.metrics()
    assert got["domain/sums/hard/tokens"] == 4
    assert got["domain/sums/hard/gradient_share"] == 1.0
    assert ledger.starved(None) is None
    assert totals([got, got])["domain sums/hard"]["tokens"] == 8


def test_shares_of_the_update_in_the_table_are_after_clipping():
    # A tenth of the gradient is left after clipping, and momentum has a fifth of the step.
    row = {"update/clipping": -7.2, "update/momentum": 0.2} | {
        f"{kind}/{name}/{what}": value
        for kind in ("teacher", "domain")
        for name, share in (("a", 6.0), ("b", 2.0))
        for what, value in (("update_share", share), ("prompts", 1.0), ("tokens", 1.0))
    }
    lines = totals([row])
    assert lines["teacher a"]["update_share"] == pytest.approx(0.6)
    assert lines["domain b"]["update_share"] == pytest.approx(0.2)


def test_the_final_line_has_what_no_teacher_had_and_the_cosines():
    rows = [{"update/momentum": 0.2, "cosine/a/b": 0.5}, {"update/momentum": 0.4, "update/decay": -0.01}, {}]
    rows[0]["update/clipping"] = -3.0  # the shares in the table are after clipping
    line = update_rest(rows)
    assert line == "rest of the update: momentum 30.0%, decay -1.0% · cosines of gradients: a/b 0.50"
    assert not update_rest([{"loss": 1.0}])
