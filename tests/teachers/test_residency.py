"""Which colocated models stay near, and that none stays awake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from practicum.engines.model_cache import ModelCache
from practicum.engines.protocol import ScoreOptions, ScoreRequest
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from practicum.models.offloaded_weights import OffloadTarget
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.teachers.load_teachers import load_colocated, make_group
from practicum.teachers.teacher_scorer import TeacherScorer
from tests.engines.engines import tiny
from tests.teachers.models import assert_same, in_process, rows, save_tiny, score_rows, scorer_of
from tests.teachers.tiny_teachers import teachers_recipe


@dataclass
class Fake:
    """A sleeper that writes down what is done to it."""

    name: str
    own_bytes: int
    on_cpu: bool
    owns_weights = True
    log: list[tuple[str, str]] = field(default_factory=list)
    awake: bool = True
    breaks_in: str = ""

    def wake(self) -> None:
        self._do("wake")
        self.awake = True

    def sleep(self) -> None:
        if not self.awake:
            raise EngineError("it sleeps")
        self._do("sleep")
        self.awake = False

    def offload(self, where: OffloadTarget) -> None:
        assert not self.awake, "only a sleeping model is moved"
        self._do(where)

    def _do(self, what: str) -> None:
        self.log.append((self.name, what))
        if self.breaks_in == what:
            raise EngineError(f"{self.name} can't {what}")


def fakes(count: int = 3, *, on_cpu: bool = False, nbytes: int = 10) -> list[Fake]:
    log: list[tuple[str, str]] = []
    return [Fake("abc"[i], nbytes, on_cpu, log) for i in range(count)]


def cache_of(models: list[Fake], budget: float | None) -> ModelCache:
    return ModelCache({model.name: model for model in models}, budget)


def levels(residency: ModelCache) -> str:
    """Where a, b and c are, by first letters: d(evice), h(ost), k (disk)."""
    short = {"device": "d", "host": "h", "disk": "k"}
    return "".join(short[residency.level(name)] for name in residency.wakes)


def use(residency: ModelCache, names: str) -> None:
    for name in names:
        with residency.awake(name):
            pass


def test_all_sleep_from_the_start_and_nobody_was_woken():
    sleepers = fakes()
    residency = cache_of(sleepers, None)
    assert not any(sleeper.awake for sleeper in sleepers)
    assert residency.wakes == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize(
    ("on_cpu", "budget", "expected"),
    [
        (True, None, "ddd"),
        (False, None, "hhh"),
        (False, 10, "hhd"),
        (False, 5, "hhh"),
        (False, 100, "ddd"),
        (True, 20, "kdd"),
        (True, 5, "kkk"),
    ],
)
def test_without_use_the_last_ones_stay_nearest(on_cpu, budget, expected):
    assert levels(cache_of(fakes(on_cpu=on_cpu), budget)) == expected


@pytest.mark.parametrize(
    ("names", "expected"), [("a", "dhd"), ("ab", "ddh"), ("abc", "hdd"), ("aba", "ddh"), ("aa", "dhd")]
)
def test_the_least_recently_used_is_moved(names, expected):
    residency = cache_of(fakes(), 20)
    use(residency, names)
    assert levels(residency) == expected


def test_a_model_is_moved_once_and_never_back_by_itself():
    sleepers = fakes()
    residency = cache_of(sleepers, 10)
    sleepers[0].log.clear()
    use(residency, "a")
    assert sleepers[0].log == [("c", "host"), ("a", "wake"), ("a", "sleep")]


def test_while_a_large_model_is_awake_nothing_else_is_on_the_device():
    sleepers = fakes()
    sleepers[2].own_bytes = 100
    residency = cache_of(sleepers, 20)
    use(residency, "ab")
    assert levels(residency) == "ddh"
    with residency.awake("c"):
        assert levels(residency)[:2] == "hh"
    assert levels(residency) == "hhh"


def test_a_large_model_that_sleeps_elsewhere_leaves_room_for_smaller_ones():
    sleepers = fakes()
    sleepers[2].own_bytes = 100
    residency = cache_of(sleepers, 20)
    use(residency, "cab")
    assert levels(residency) == "ddh"


def test_each_use_is_one_wake_and_one_sleep():
    sleepers = fakes()
    residency = cache_of(sleepers, None)
    sleepers[0].log.clear()
    use(residency, "aba")
    assert residency.wakes == {"a": 2, "b": 1, "c": 0}
    acts = [act for act in sleepers[0].log if act[1] in ("wake", "sleep")]
    assert acts == [(name, what) for name in "aba" for what in ("wake", "sleep")]


@pytest.mark.parametrize("error", [ValueError("inside"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_it_sleeps_again_whatever_happens_inside(error):
    sleepers = fakes()
    residency = cache_of(sleepers, 10)
    with pytest.raises(type(error)), residency.awake("a"):
        raise error
    assert sleepers[0].log[-3:] == [("c", "host"), ("a", "wake"), ("a", "sleep")]
    assert not sleepers[0].awake
    assert levels(residency) == "dhh"


def test_one_that_can_not_be_woken_says_so_itself_and_is_named():
    sleepers = fakes()
    residency = cache_of(sleepers, 10)
    sleepers[0].breaks_in = "wake"
    with pytest.raises(EngineError, match="a can't be woken: a can't wake"), residency.awake("a"):
        raise AssertionError("it is not awake")
    assert not any(sleeper.awake for sleeper in sleepers)


def test_trouble_with_sleeping_does_not_hide_what_went_wrong_inside():
    sleepers = fakes()
    residency = cache_of(sleepers, 10)
    sleepers[0].breaks_in = "sleep"
    with pytest.raises(ValueError, match="inside") as caught, residency.awake("a"):
        raise ValueError("inside")
    assert any("a can't sleep" in note for note in caught.value.__notes__)


def test_trouble_with_sleeping_alone_is_an_error():
    sleepers = fakes()
    residency = cache_of(sleepers, 10)
    sleepers[0].breaks_in = "sleep"
    with pytest.raises(EngineError, match="a can't sleep"), residency.awake("a"):
        pass


@pytest.fixture
def teacher(tmp_path: Path) -> Iterator[TeacherScorer]:
    save_tiny(tmp_path)
    scorer = scorer_of(Teacher(model=str(tmp_path), batch_tokens=100, device="cpu"))
    yield scorer
    scorer.close()


def engine_in(teacher: TeacherScorer) -> TorchEngine:
    assert isinstance(teacher.sleeper, TorchEngine)
    return teacher.sleeper


def score(scorer: TeacherScorer, some: list[ScoreRequest], wanted: ScoreOptions) -> list:
    return asyncio.run(score_rows(scorer, some, wanted))


@pytest.mark.parametrize("where", ["host", "disk"])
def test_scores_and_weights_are_the_same_bits_after_a_rest(teacher: TeacherScorer, where: OffloadTarget):
    some, wanted, engine = rows(8), ScoreOptions(top_k=3, hidden=True, temperature=0.7), engine_in(teacher)
    assert_same(score(teacher, some, wanted), in_process(tiny(), some, wanted))
    other = tiny(seed=5)
    teacher.take({name: p.detach() for name, p in other.named_parameters()}, 7)
    engine.sleep()
    engine.offload(where)
    engine.wake()
    found = score(teacher, some, wanted)
    assert_same(found, in_process(other, some, wanted))
    assert {scores.version for scores in found} == {7}


def test_on_disk_the_weights_leave_memory_and_come_back(teacher: TeacherScorer):
    engine = engine_in(teacher)
    held = sum(p.nbytes for p in engine.model.parameters())
    distinct = {p.data_ptr(): p.nbytes for p in engine.model.parameters()}
    buffers = sum(b.nbytes for b in engine.model.buffers())
    assert engine.own_bytes == sum(distinct.values()) + buffers, "tied weights count once"
    assert engine.on_cpu
    residency = ModelCache({"math": engine}, 1)
    assert residency.level("math") == "disk"
    assert sum(p.nbytes for p in engine.model.parameters()) == 0
    with residency.awake("math"):
        assert sum(p.nbytes for p in engine.model.parameters()) == held
    assert sum(p.nbytes for p in engine.model.parameters()) == 0


def test_a_copy_of_the_student_shares_nothing_with_it_and_is_not_trained():
    student = tiny()
    recipe = Recipe.model_validate(teachers_recipe(teachers={"self": {"student": {}}}, distill={}))
    group = make_group(recipe.teachers, recipe.distill, recipe.model, recipe.seed, student)
    scorer = load_colocated(group)["self"]
    twin = engine_in(scorer).model
    scorer.close()
    assert not any(p.requires_grad for p in twin.parameters())
    assert all(p.requires_grad for p in student.parameters())
    with torch.no_grad():
        for p in student.parameters():
            p.add_(1.0)
    untouched = dict(tiny().named_parameters())
    assert all(torch.equal(p, untouched[name]) for name, p in twin.named_parameters())
