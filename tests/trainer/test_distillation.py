"""Whole runs with teachers: where they live does not matter, runs resume, students move towards them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from practicum.dataplane.ragged import Ragged
from practicum.errors import PracticumError, TeacherError
from practicum.models.load_model import load_model
from practicum.models.tokenizer import make_tokenizer
from practicum.observe.metrics import METRICS
from practicum.processes.host import Host
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.recipe.schema.recipe import Model
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.trainer import preflight as preflight_module
from practicum.trainer.run import train_loaded
from tests.serving.servers import MODEL, served
from tests.teachers.test_own import alive, until
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe

from .test_run import metrics_of, stop_after, weights_of

SAMPLED = {"divergence": "k2", "signal": "sampled"}
TWO = {"by": "task", "map": {"copy": "small", "compare": "wide"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two teachers of different hidden sizes, and one with other tokens."""
    root = tmp_path_factory.mktemp("teachers")
    other = make_tokenizer()
    other.add_tokens(["ß"])
    folders = {
        "small": save_teacher(root / "small", seed=1),
        "wide": save_teacher(root / "wide", seed=2, hidden=48),
        "foreign": save_teacher(root / "foreign", seed=3),
    }
    other.save_pretrained(folders["foreign"])
    return folders


def write(folder: Path, **sections: Any) -> LoadedRecipe:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(teachers_recipe(**sections)))
    return load_recipe(path)


def two(folders: dict[str, str], **each: Any) -> dict[str, Any]:
    return {name: {"model": folders[name], **each} for name in ("small", "wide")}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """What teachers wrote in each step of the runs of a test."""
    steps: list[dict[str, Tensor]] = []
    clear = RolloutRole.clear

    def keep(self: RolloutRole, step: StepInfo) -> None:
        columns = self.store.get(step.batch.real(), self.plan["teachers"].writes)
        steps.append({name: c.values.clone() for name, c in columns.items() if isinstance(c, Ragged)})
        clear(self, step)

    monkeypatch.setattr(RolloutRole, "clear", keep)
    return steps


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics without what the clock says."""
    timed = re.compile(
        r"time/.*|rollout/tokens_per_second|teacher/.*/seconds|teachers/overlap_fraction|shared/.*"
    )
    return [{k: v for k, v in row.items() if not timed.fullmatch(k)} for row in metrics_of(folder)]


def same_run(a: Path, b: Path) -> None:
    assert timeless(a) == timeless(b)
    one, other = weights_of(a), weights_of(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize("signal", ["top_k", "full"])
def test_an_own_teacher_teaches_as_a_colocated_one_bit_for_bit(
    tmp_path: Path, folders: dict[str, str], said: list[dict[str, Tensor]], signal: str
):
    for placement in ("colocated", "own"):
        teachers = two(folders, placement=placement)
        loaded = write(tmp_path, teachers=teachers, route=TWO, distill={"signal": signal})
        train_loaded(loaded, tmp_path / placement)
    here, there = said[:2], said[2:]
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    one, other = weights_of(tmp_path / "colocated"), weights_of(tmp_path / "own")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(0 <= row["teachers/overlap_fraction"] <= 1 for row in metrics_of(tmp_path / "own")[1:])
    assert "teachers/overlap_fraction" not in metrics_of(tmp_path / "colocated")[1]


@pytest.mark.parametrize("distill", [SAMPLED, {"signal": "top_k", "top_k": 8}], ids=["sampled", "top_k"])
def test_a_teacher_behind_a_url_teaches_as_a_colocated_one(
    tmp_path: Path, folders: dict[str, str], said: list[dict[str, Tensor]], distill: dict[str, Any]
):
    # Servers score whole sequences, which rounds otherwise; AdamW blows that up where it divides by nothing.
    sections = {
        "distill": distill,
        "train": {"steps": 2, "prompts": 4, "lr": 1e-3, "optimizer": "tests.learning.optimizers:steady"},
    }
    loaded = write(tmp_path, teachers={"small": {"model": folders["small"]}}, **sections)
    train_loaded(loaded, tmp_path / "here")
    with served(load_model(Model(path=folders["small"], device="cpu"), 0)) as server:
        teachers = {"small": {"url": server.url, "model": MODEL, "tokenizer": folders["small"]}}
        train_loaded(write(tmp_path, teachers=teachers, **sections), tmp_path / "there")
    for one, other in zip(said[:2], said[2:], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)
    one, other = weights_of(tmp_path / "here"), weights_of(tmp_path / "there")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)


SELF = {"teachers": {"self": {"student": {"every": 2}, "prompt_prefix": "{answer}"}}}
LONGER = {"train": {"steps": 5, "prompts": 4, "lr": 1e-2}}


@pytest.mark.parametrize(("signal", "cut"), [("top_k", 2), pytest.param("full", 3, marks=pytest.mark.long)])
def test_a_run_with_a_copy_of_the_student_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str, cut: int
):
    _cut_and_resume(tmp_path, monkeypatch, cut, distill={"signal": signal}, **SELF, **LONGER)


@pytest.mark.parametrize(
    "distill",
    [{"divergence": "abs", "signal": "sampled"}, {"signal": "top_k", "top_k": 8}, {"signal": "full"}],
    ids=["abs", "top_k", "full"],
)
def test_a_teacher_with_the_students_weights_gives_exactly_no_signal(tmp_path: Path, distill: dict[str, Any]):
    teachers = {"self": {"student": {"every": 1}}}
    train = {"steps": 1, "prompts": 4, "lr": 1e-2, "microbatch_tokens": 64}
    loaded = write(tmp_path, teachers=teachers, distill=distill, train=train, reward={"weight": 0.0})
    train_loaded(loaded, tmp_path / "run")
    row = metrics_of(tmp_path / "run")[1]
    assert row["train/tokens"] > 0
    assert row["train/loss"] == row["train/grad_norm"] == 0.0


@pytest.mark.long
def test_a_run_with_an_own_copy_of_the_student_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    teachers = {"self": {"student": {"every": 2}, "prompt_prefix": "{answer}", "placement": "own"}}
    _cut_and_resume(tmp_path, monkeypatch, 3, distill={"signal": "full"}, teachers=teachers, **LONGER)


@pytest.mark.parametrize("measure_every", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_run_with_two_teachers_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], measure_every: int
):
    route = TWO | {"shares": {"small": 0.7, "wide": 0.3}, "measure_every": measure_every}
    _cut_and_resume(tmp_path, monkeypatch, 2, distill={}, teachers=two(folders), route=route, **LONGER)


def _cut_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, **sections: Any) -> None:
    train_loaded(write(tmp_path, **sections), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, cut, lambda: os.kill(os.getpid(), signal.SIGINT))
        outcome = train_loaded(write(tmp_path, **sections), tmp_path / "cut")
    assert (outcome.interrupted, outcome.steps) == (True, cut)
    train_loaded(write(tmp_path, **sections), tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


PRACTICE = {
    "rollout": {"samples": 8, "max_new_tokens": 6, "max_num_seqs": 64},
    "train": {"steps": 20, "prompts": 8, "lr": 5e-3},
}


@pytest.mark.parametrize(
    ("distill", "more"),
    [
        ({"signal": "full"}, {}),
        pytest.param({"signal": "top_k"}, {}, marks=pytest.mark.long),
        ({"divergence": "k1_straight", "signal": "sampled"}, {}),
        pytest.param(
            {"divergence": "k1", "signal": "sampled", "apply_as": "advantage"}, {}, marks=pytest.mark.long
        ),
        pytest.param(
            {"divergence": "k1", "signal": "sampled", "apply_as": "reward"},
            {"algorithm": {"advantage": "reinforce_pp"}},
            marks=pytest.mark.long,
        ),
    ],
    ids=["full", "top_k", "sampled", "advantage", "reward"],
)
def test_the_student_moves_towards_its_teachers(
    tmp_path: Path, folders: dict[str, str], distill: dict[str, Any], more: dict[str, Any]
):
    loaded = write(tmp_path, teachers=two(folders), route=TWO, distill=distill, **PRACTICE, **more)
    train_loaded(loaded, tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    for name in ("train/teacher_kl", "teacher/small/kl", "teacher/wide/kl"):
        first, last = fmean(r[name] for r in rows[:3]), fmean(r[name] for r in rows[-3:])
        assert last < 0.9 * first, name


def test_pure_distillation_judges_nothing_and_needs_no_advantages(tmp_path: Path, folders: dict[str, str]):
    loaded = write(tmp_path, teachers=two(folders), route=TWO, distill={})
    plan = make_plan(loaded.recipe)
    assert [stage.name for stage in plan] == ["rollout", "teachers", "update_student", "sync", "clear"]
    train_loaded(loaded, tmp_path / "run")
    for row in metrics_of(tmp_path / "run")[1:]:
        stages = {name.removeprefix("time/") for name in row if name.startswith("time/")}
        assert stages - {"eval"} == {"rollout", "teachers", "update_student", "sync", "clear", "step"}
        assert not [name for name in row if name.startswith(("reward/", "advantage/"))]


GAE = {"algorithm": {"advantage": "gae"}, "critic": {}}
JUDGED = {"reward": {"weight": 1.0, "functions": [{"use": "tests.trainer.rewards:even_length"}]}}
MINI = {"train": {"steps": 2, "prompts": 4, "minibatches": 4, "epochs": 2, "lr": 1e-3}}
PROJECTED = TWO | {"project": True, "measure_every": 0}
SHARED = TWO | {"measure_every": 1, "shares": {"small": 0.9, "wide": 0.1}}


@pytest.mark.parametrize(
    "sections",
    [
        {"distill": {"signal": "full"}, "route": SHARED},
        {"distill": SAMPLED, "route": SHARED, **MINI},
        {"distill": {"divergence": "unbiased_reverse_kl", "top_k": 4}, "route": PROJECTED, **MINI},
        {"distill": {"divergence": "k1", "signal": "sampled", "apply_as": "advantage"}, **JUDGED},
        {"distill": {"divergence": "k1", "signal": "sampled", "apply_as": "reward"}, **GAE},
        {"distill": {}, "reward": JUDGED["reward"] | {"weight": 0.0, "log_only": True}},
        {"distill": {"temperature": 2.0}, **JUDGED, "algorithm": {"advantage": "remax", "loss": "gspo"}},
        {"distill": {}, **JUDGED, "refills": 20, "algorithm": {"kl": {"place": "loss"}}},
    ],
    ids=["full", "minibatches", "unbiased", "advantage", "reward", "watch", "remax", "filter"],
)
def test_each_kind_of_run_finishes_and_documents_its_metrics(
    tmp_path: Path, folders: dict[str, str], sections: dict[str, Any]
):
    train_loaded(write(tmp_path, **{"teachers": two(folders), "route": TWO} | sections), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    known = "|".join(re.sub(r"<[^>]+>", "[^/]+", re.escape(name)) for name in METRICS)
    for row in rows:
        assert not [name for name in row if not re.fullmatch(known, name)]
    for row in rows[1:]:
        for what in ("prompts_share", "tokens_share", "loss_share"):
            for part in ("teacher/small", "teacher/wide"), ("domain/copy", "domain/compare"):
                present = [row[f"{p}/{what}"] for p in part if f"{p}/{what}" in row]
                assert sum(present) == pytest.approx(1.0)
        for name in ("small", "wide"):
            if f"teacher/{name}/prompts" in row:
                assert row[f"teacher/{name}/wakes"] == 1
    if sections.get("route") is SHARED:
        assert any("teacher/small/gradient_share" in row for row in rows)
    for row in rows:
        rest = [value for name, value in row.items() if name.startswith("update/")]
        if rest:
            shares = [row[name] for name in row if re.fullmatch("teacher/[^/]+/update_share", name)]
            assert sum(shares) + sum(rest) == pytest.approx(1.0, abs=1e-6)
        both = {"teacher/small/prompts", "teacher/wide/prompts"} <= row.keys()
        assert ("update/projection" in row) <= (sections.get("route") is PROJECTED and both)


def test_a_product_of_teachers_teaches(tmp_path: Path, folders: dict[str, str]):
    teachers = two(folders)
    route = {"by": "task", "map": {"copy": "small", "compare": "small"}}
    sections = {"teachers": teachers, "route": route, "distill": {"signal": "full"}}
    teachers["small"]["target"] = {"small": 1.25, "wide": -0.25}
    train_loaded(write(tmp_path, **sections), tmp_path / "product")
    teachers["small"]["target"] = {"small": 1.0, "wide": 0.0}
    train_loaded(write(tmp_path, **sections), tmp_path / "same")
    teachers.pop("wide")
    teachers["small"].pop("target")
    train_loaded(write(tmp_path, **sections | {"route": {}}), tmp_path / "alone")
    product, same, alone = (weights_of(tmp_path / name) for name in ("product", "same", "alone"))
    assert all(torch.equal(x, alone[name]) for name, x in same.items())
    assert not all(torch.equal(x, alone[name]) for name, x in product.items())


def test_shares_are_met_in_every_step(tmp_path: Path, folders: dict[str, str]):
    route = TWO | {"shares": {"small": 0.9, "wide": 0.1}}
    train_loaded(write(tmp_path, teachers=two(folders), route=route, distill={}), tmp_path / "run")
    for row in metrics_of(tmp_path / "run")[1:]:
        if {"teacher/small/loss_share", "teacher/wide/loss_share"} <= row.keys():
            assert row["teacher/small/loss_share"] == pytest.approx(0.9, abs=1e-6)


def test_teachers_kept_on_disk_teach_the_same(tmp_path: Path, folders: dict[str, str]):
    for name, runtime in (("near", {"threads": 1}), ("far", {"threads": 1, "teachers_gb": 1e-6})):
        sections = {"teachers": two(folders), "route": TWO, "distill": {"signal": "full"}}
        train_loaded(write(tmp_path, runtime=runtime, **sections), tmp_path / name)
    same_run(tmp_path / "near", tmp_path / "far")


def test_every_trajectory_is_learnt_from(tmp_path: Path, folders: dict[str, str]):
    agent = {"loop": "tests.trainer.loops:two_trajectories"}
    loaded = write(tmp_path, teachers=two(folders), route=TWO, distill={}, agent=agent)
    train_loaded(loaded, tmp_path / "run")
    for row in metrics_of(tmp_path / "run")[1:]:
        taught = sum(row.get(f"teacher/{name}/tokens", 0) for name in ("small", "wide"))
        assert taught == row["rollout/tokens"] == row["train/tokens"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher for a task": ({"route": {"by": "task", "map": {"copy": "small"}}}, r"compare"),
    "a teacher without prompts": (
        {"route": {"by": "task", "map": dict.fromkeys(TWO["map"], "small")}},
        "wide",
    ),
    "other tokens": ({"teachers": ["small", "foreign"]}, r"teachers\.foreign\.model.*'ß'"),
    "a short context": ({"teachers": [("small", {"context": 8})]}, r"teachers\.small\.context"),
    "a missing folder": ({"teachers": [("small", {"model": "nowhere/at/all"})]}, r"teachers\.small\.model"),
    "a dead pair": ({"distill": {"divergence": "k1", "signal": "sampled"}}, "does not depend on the teacher"),
    "too many best tokens": ({"distill": {"signal": "top_k", "top_k": 5000}}, r"distill\.top_k"),
    "nobody at the url": (
        {"teachers": [("small", {"url": "http://127.0.0.1:9/v1"})]},
        r"teacher small at http://127\.0\.0\.1:9/v1",
    ),
    "the same teacher twice": (
        {"teachers": ["small", ("wide", {"model": "small"})]},
        "the same teacher as small",
    ),
    "shares that miss one": ({"route": TWO | {"shares": {"small": 1.0}}}, r"route\.shares.*no share of wide"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_recipe_that_can_not_teach_is_refused_before_weights_are_loaded(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, case: str
):
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    for module in (
        "practicum.trainer.preflight",
        "practicum.runtime.local",
        "practicum.engines.torch.make_torch",
    ):
        monkeypatch.setattr(f"{module}.load_model", load)
    sections, message = BAD[case]
    names: list[Any] = sections.get("teachers", ["small", "wide"])
    teachers = {}
    for entry in names:
        name, more = (entry, {}) if isinstance(entry, str) else entry
        teachers[name] = {"model": folders[name], **more}
        teachers[name]["model"] = folders.get(teachers[name]["model"], teachers[name]["model"])
    given = dict(zip(("copy", "compare"), teachers, strict=False))
    route = {"route": {"by": "task", "map": given}} if len(teachers) > 1 else {}
    sections = {"distill": {}} | route | {k: v for k, v in sections.items() if k != "teachers"}
    with pytest.raises(PracticumError, match=f"(?s){message}"):
        preflight_module.preflight(write(tmp_path, teachers=teachers, **sections))


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes of own teachers that were started in a test."""
    started: list[int] = []
    start = Host._start

    def keep(self: Host, load: Any) -> None:
        start(self, load)
        started.append(self.pid)

    monkeypatch.setattr(Host, "_start", keep)
    return started


def assert_gone(pids: list[int]) -> None:
    assert pids
    assert until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.long
@pytest.mark.slow
def test_an_own_teacher_that_is_killed_in_a_run_is_named_and_no_process_stays(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, pids: list[int]
):
    stop_after(monkeypatch, 1, lambda: os.kill(pids[0], signal.SIGKILL))
    loaded = write(tmp_path, teachers=two(folders, placement="own"), route=TWO, distill={}, **LONGER)
    with pytest.raises(TeacherError, match=r"teacher small .*prompt \d+.*SIGKILL"):
        train_loaded(loaded, tmp_path / "run")
    assert len(pids) == 2
    assert_gone(pids)
    assert "stopped by TeacherError: teacher small" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_can_not_start_leaves_no_teacher_behind(
    tmp_path: Path, folders: dict[str, str], pids: list[int]
):
    config = GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=1, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "other")
    loaded = write(
        tmp_path,
        teachers={"small": {"model": folders["small"], "placement": "own"}},
        distill={},
        algorithm={"kl": {"place": "loss", "reference": str(tmp_path / "other")}},
    )
    with pytest.raises(PracticumError, match=r"kl\.reference"):
        train_loaded(loaded, tmp_path / "run")
    assert_gone(pids)
