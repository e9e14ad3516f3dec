"""Two data-parallel ranks learn, measure and write what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from practicum.errors import EngineError, PracticumError
from practicum.learning.learner import Learner
from practicum.learning.learner_checkpoint import read_weights
from practicum.learning.parallel import Parallel, free_port
from practicum.learning.value_learner import ValueLearner
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe

from . import roles_on_ranks
from .ranks import CASES, SINGLE, TRAIN, UPDATES, WORLD, Found, on_ranks
from .reference import random_batch, tiny

assert roles_on_ranks, "its cases are among CASES"
pytestmark = [pytest.mark.timeout(600)]
"""The processes are started once, by whichever test comes first."""


def run_cases(parallel: Parallel | None, folder: Path) -> dict[str, Found]:
    """All cases; what they save lies in folders of their names. Two ranks also go on from what one saved."""
    found = {name: function(parallel, folder / name) for name, function in CASES.items()}
    if parallel is not None:
        found["resumed"] = resumed(parallel, folder.parent / "one" / "ragged_rows" / "student")
    return found


def resumed(parallel: Parallel | None, saved: Path) -> Found:
    """A learner that goes on from a checkpoint: what it has."""
    found, learner = Found(), Learner(tiny(seed=7), TRAIN, Algorithm(), parallel=parallel)
    learner.load(saved)
    found.metrics.append({"version": learner.version})
    found.keep(learner.model, learner.stepper)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("one", "two"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Found]:
    return run_cases(None, folder / "one")


@pytest.fixture(scope="module")
def together(folder: Path, alone: dict[str, Found]) -> list[dict[str, Found]]:
    """What each of the ranks found; they read a checkpoint of the one process."""
    return on_ranks(folder / "two", run_cases)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_process_does(name, alone, together):
    one, ranks = alone[name], [found[name] for found in together]
    exact = name not in SINGLE
    for rank in ranks:
        assert rank.tensors.keys() == one.tensors.keys()
        for key, tensor in one.tensors.items():
            torch.testing.assert_close(
                rank.tensors[key], tensor, rtol=0, atol=1e-9 if exact else 2e-5, msg=key
            )
        assert len(rank.metrics) == len(one.metrics)
        for mine, theirs in zip(rank.metrics, one.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9 if exact else 1e-4, abs=1e-9)
        assert rank.refused == one.refused
    assert ranks[0].metrics == ranks[1].metrics


@pytest.mark.parametrize("name", CASES)
def test_each_row_is_computed_on_one_rank_and_equals_one_process_s(name, alone, together):
    for column, rows in alone[name].columns.items():
        parts = [found[name].columns.get(column, {}) for found in together]
        assert not parts[0].keys() & parts[1].keys() or column.startswith("read")
        both = parts[0] | parts[1]
        assert both.keys() == rows.keys()
        for key, row in rows.items():
            torch.testing.assert_close(both[key], row, rtol=0, atol=1e-6, msg=f"{column} of {key}")


def test_ranks_read_their_own_rows_alone(together):
    read = [found["roles_with_minibatches"].columns["read 1"].keys() for found in together]
    assert not read[0] & read[1]
    assert abs(len(read[0]) - len(read[1])) <= 1
    assert [len(found["roles_with_one_row"].columns["read 1"]) for found in together] in ([0, 1], [1, 0])


def test_a_refused_step_names_what_was_wrong_on_every_rank(together):
    for found in together:
        finite, checked = found["refusals"].refused
        assert "nan" in finite
        assert checked.startswith("refused with")


def test_a_checkpoint_of_two_ranks_is_read_by_one_and_the_other_way(folder, alone, together):
    of_one = alone["ragged_rows"].tensors
    for found in together:
        (counters,) = found["resumed"].metrics
        assert counters == {"version": UPDATES}
        assert all(torch.equal(x, of_one[name]) for name, x in found["resumed"].tensors.items())
    back = resumed(None, folder / "two" / "ragged_rows" / "student")
    of_two = together[0]["ragged_rows"].tensors
    assert back.tensors.keys() <= of_two.keys()
    assert all(torch.equal(x, of_two[name]) for name, x in back.tensors.items())
    weights = read_weights(folder / "two" / "ragged_rows" / "student")
    assert weights.keys() == dict(tiny(seed=7).named_parameters()).keys()
    assert all(torch.equal(x, of_two[name]) for name, x in weights.items())
    critic = ValueLearner(tiny(seed=7), TRAIN, CriticRecipe())
    critic.load(folder / "two" / "critic" / "critic")
    weights = together[0]["critic"].tensors
    assert all(torch.equal(p, weights[name]) for name, p in critic.model.named_parameters())
    assert critic.version == UPDATES


def test_an_export_of_two_ranks_is_that_of_one(folder, together):
    models = [
        AutoModelForCausalLM.from_pretrained(folder / n / "ragged_rows" / "export", dtype=torch.float64)
        for n in ("one", "two")
    ]
    ids = torch.tensor([[1, 2, 3, 4]])
    one, two = (model(ids).logits for model in models)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
    names = [
        sorted(f.name for f in (folder / n / "ragged_rows" / "export").iterdir()) for n in ("one", "two")
    ]
    assert names[0] == names[1]
    sent = {k.removeprefix("sent."): w for k, w in together[1]["ragged_rows"].tensors.items() if "sent." in k}
    assert sent.keys() == {name for name, _ in tiny().named_parameters()}, "tied weights are sent once"


def test_a_device_without_collectives_is_refused_in_words():
    with pytest.raises(EngineError, match="use cpu or cuda"):
        Parallel.join(0, 1, "127.0.0.1", free_port(), 1.0, device="mps")


def test_a_rank_that_meets_nobody_says_so_in_time():
    with pytest.raises(PracticumError, match="learner rank 1 did not meet the other 1"):
        Parallel.join(1, WORLD, "127.0.0.1", free_port(), timeout_s=1.0)


def test_an_update_of_a_rank_needs_to_know_the_whole_minibatch():
    learner = Learner(tiny(), TRAIN, Algorithm())
    learner.parallel = learner.trunk.parallel = Parallel(0, WORLD)
    with pytest.raises(AssertionError, match="whole mini-batch"):
        learner.update(random_batch(0))
