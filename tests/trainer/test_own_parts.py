"""Parts of the user's own, those of docs/extend.md: used in both runtimes, refused with a sentence."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from practicum.algorithms.divergences import sampled_divergence
from practicum.checks.watch import Watch
from practicum.cli import app
from practicum.dataplane.batch import BatchRef
from practicum.errors import CheckError, PracticumError, RecipeError, RecipeErrors
from practicum.recipe.algorithm_traits import LossTraits, loss_traits
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.own_parts import PARTS
from practicum.roles.stage_table import make_plan
from practicum.trainer.preflight import check_without_models
from practicum.trainer.run import train_loaded
from practicum.trainer.try_functions import check_parts, parts_of
from tests.cluster import local_ray
from tests.docs.pages import ROOT, blocks_of

from .recipes import tiny
from .test_ray import assert_same_run, on_ray
from .test_run import metrics_of, weights_of

PAGE = ROOT / "docs/extend.md"
ALL: dict[str, Any] = {
    "tasks": {"twice": {"kind": "letters:TWICE", "options": {"length": [1, 2]}}, "copy": {"kind": "copy"}},
    "algorithm": {
        "advantage": "median:median",
        "loss": "spo:spo",
        "aggregation": "roots:root_mean",
        "kl": {"place": "loss", "estimator": "kl:log_cosh"},
    },
    "train": {
        "steps": 2,
        "prompts": 3,
        "minibatches": 2,
        "lr": 1e-2,
        "schedule": "training:inverse_root",
        "optimizer": "training:sgd",
    },
    "reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]},
    "checks": {"level": "warn", "own": ["watchers:long_answers"]},
    "track": {"to": ["csv_tracker:Csv"]},
    "stages": ["surprises:surprise", "surprises:mean_surprise"],
    "eval": {"rows": 2},
}
"""A part of each kind but divergences, which need teachers."""


@pytest.fixture(autouse=True)
def forgotten(own_parts: None) -> None:
    """Parts of one test are not those of another."""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for block in blocks_of(PAGE, "python"):
        assert block.file is not None
        (tmp_path / block.file).write_text(block.text)
    return tmp_path


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with local_ray(cpus=8):
        yield


def written(folder: Path, text: str, **sections: Any) -> LoadedRecipe:
    """The tiny recipe beside a module `mine` with this text."""
    (folder / "mine.py").write_text(text)
    return tiny(folder, **sections)


def test_the_page_names_every_kind():
    text = PAGE.read_text()
    for kind, part in PARTS.items():
        assert re.search(rf"`(practicum\.)?{kind}`", text), kind
        assert f"`{part.key}`" in text or kind in ("reward", "loop", "tool")


def test_a_run_of_parts_of_ones_own_alone_is_the_same_after_a_stop(beside: Path):
    loaded = tiny(beside, **ALL)
    kinds = [kind for kind, _ in parts_of(loaded.recipe)]
    assert kinds == [*("advantage", "policy_loss", "aggregation", "kl_estimator"), *kinds[4:]]
    assert kinds[4:] == ["schedule", "optimizer", "check", "tracker"]
    names = [stage.name for stage in make_plan(loaded.recipe)]
    assert names[names.index("advantages") :][:3] == ["advantages", "surprise", "mean_surprise"]
    train_loaded(loaded, beside / "run")
    rows = metrics_of(beside / "run")[1:]
    assert [row["train/lr"] for row in rows] == pytest.approx([1e-2, 1e-2 / 2**0.5])
    for row in rows:
        assert row["mean_surprise/rows"] == 12, "padding is no row of a stage"
        assert row["mean_surprise/mean"] > 0
    logged = list(csv.reader((beside / "run/reward.csv").open()))
    assert [step for step, _ in logged] == ["0", "1", "2"]
    train_loaded(tiny(beside, "train.steps=1", **ALL), beside / "part")
    train_loaded(loaded, beside / "part", resume=True, change=True)
    assert all(
        weight.equal(weights_of(beside / "run")[name]) for name, weight in weights_of(beside / "part").items()
    )


@pytest.mark.long
@pytest.mark.slow
def test_ray_workers_import_the_parts_themselves(beside: Path, ray_cluster: None):
    train_loaded(tiny(beside, **ALL), beside / "local")
    train_loaded(tiny(beside, **on_ray(ALL, ranks=2)), beside / "ray")
    assert_same_run(beside / "local", beside / "ray", tolerance=1e-6)


def test_a_divergence_of_ones_own_is_learnt_from(beside: Path):
    sections: dict[str, Any] = {
        "teachers": {"old": {"student": {}, "prompt_prefix": "1"}},
        "distill": {"divergence": "hellinger:hellinger", "signal": "full"},
        "reward": {"weight": 0.0},
        "train": {"steps": 1, "prompts": 2},
        "eval": {"rows": 2},
    }
    train_loaded(tiny(beside, **sections), beside / "run")
    row = metrics_of(beside / "run")[1]
    assert row["train/distill_loss"] > 0
    assert row["train/grad_norm"] > 0


@pytest.mark.parametrize("through", ["loss", "advantage"])
def test_with_the_signal_sampled_a_divergence_is_of_log_ratios(beside: Path, through: str):
    distill = {"divergence": "kl:log_cosh", "signal": "sampled", "apply_as": through}
    recipe = tiny(beside, teachers={"old": {"student": {}}}, distill=distill).recipe
    assert recipe.distill is not None
    (finding,) = check_parts(recipe)
    assert finding == "custom parts, each called once: distill.divergence kl:log_cosh"
    logprobs_N, teacher_N = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])
    found = sampled_divergence(recipe.distill.divergence, logprobs_N, teacher_N)
    assert found.tolist() == pytest.approx([0.0, math.log(math.cosh(1.0))])


def algorithm(**keys: Any) -> dict[str, Any]:
    return {"algorithm": keys}


KL_IN_LOSS = algorithm(kl={"place": "loss", "estimator": "mine:f"})
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("def f(a, b): ...", algorithm(advantage="mine:f"), "algorithm.advantage"),
    ("def f(x): return x", algorithm(advantage="mine:f"), "algorithm.advantage"),
    (
        "from practicum.parts import AdvantageResult\ndef f(x): return AdvantageResult(x.mask_N)",
        algorithm(advantage="mine:f"),
        "algorithm.advantage",
    ),
    ("f = 3", algorithm(loss="mine:f"), "algorithm.loss"),
    ("def f(x): return x.mask_N", algorithm(loss="mine:f"), "algorithm.loss"),
    ("def f(a, b): return a - 2", algorithm(aggregation="mine:f"), "algorithm.aggregation"),
    ("def f(x): return x.mean()", KL_IN_LOSS, "algorithm.kl.estimator"),
    ("def f(x): return x.detach()", KL_IN_LOSS, "algorithm.kl.estimator"),
    ("def f(step, train): return -1.0", {"train": {"steps": 2, "schedule": "mine:f"}}, "train.schedule"),
    ("def f(parameters, train): ...", {"train": {"steps": 2, "optimizer": "mine:f"}}, "train.optimizer"),
    ("", {"train": {"steps": 2, "optimizer": "torch.optim:SGD"}}, "train.optimizer"),
    ("def f(metrics): ...", {"checks": {"own": ["mine:f"]}}, "checks.own"),
    ("def groups(m, b): ...", {"checks": {"own": ["mine:groups"]}}, "checks.own"),
    ("def f(draws): ...", {"tasks": {"t": {"kind": "mine:f"}}}, "tasks.t.kind"),
]


@pytest.mark.parametrize(("text", "sections", "key"), WRONG, ids=[text for text, *_ in WRONG])
def test_a_part_that_can_not_be_used_is_refused_at_its_key(
    tmp_path: Path, text: str, sections: dict[str, Any], key: str
):
    with pytest.raises(PracticumError, match=rf"(^|\s){re.escape(key)}: "):
        check_without_models(written(tmp_path, text, **sections).recipe)


def test_a_pull_that_is_not_the_derivative_is_refused(tmp_path: Path):
    sections: dict[str, Any] = {"teachers": {"t": {"student": {}}}, "distill": {"divergence": "mine:f"}}
    text = "from practicum.parts import BucketTerms\ndef f(b): return BucketTerms((b.p - b.q).square(), b.p)"
    with pytest.raises(RecipeError, match=r"a pull that differs from p d\(value\)/dp by"):
        check_parts(written(tmp_path, text, **sections).recipe)


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ("after='rollout'", "which comes after 'rollout', expected a stage after one of pad, "),
        ("after='advantages', writes=['advantage']", "did you mean advantages"),
        ("after='advantages', reads=['surprise']", "reads surprise, which no stage before it writes"),
        (
            f"after='advantages', writes=[Field('a', 'float31', *{('response', '', '', 'zero')})]",
            "dtype float31",
        ),
        ("after='advantages', writes=[Field('a', 'float32', 'response', '', '')]", "has no padding rule"),
        (
            "after='advantages', writes=[Field('a', 'float32', 'response', '', '', 'zero', ('Y',))]",
            "axis 'Y'",
        ),
    ],
)
def test_a_stage_that_could_not_run_is_refused(tmp_path: Path, declared: str, sentence: str):
    text = "from practicum.parts import Field, stage\n"
    text += f"@stage({declared})\ndef f(rank, batch, columns, step): ..."
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        make_plan(written(tmp_path, text, stages=["mine:f"]).recipe)


def test_a_field_may_have_any_number_type_and_further_axes(tmp_path: Path):
    text = """
import torch
from practicum.parts import Field, Ragged, stage
PAIRS = Field("pairs", "bfloat16", "response", "pairs", "two numbers", padding="zero", trailing=(2,))
@stage(after="pad", reads=["response_mask"], writes=[PAIRS])
def pairs(rank, batch, columns, step):
    mask = columns.ragged("response_mask")
    return {"pairs": Ragged.packed(torch.ones(len(mask.values), 2, dtype=torch.bfloat16), mask.lengths)}
@stage(after="pairs", reads=["pairs"])
def total(rank, batch, columns, step):
    return {}, {"sum": float(columns.ragged("pairs").values.sum())}
"""
    sections = {"train": {"steps": 1, "prompts": 3, "minibatch_size": 8}, "eval": {"rows": 2}}
    loaded = written(tmp_path, text, stages=["mine:pairs", "mine:total"], **sections)
    train_loaded(loaded, tmp_path / "run")
    row = metrics_of(tmp_path / "run")[1]
    assert row["padding/rows"] == 4
    assert row["total/sum"] > 0


def test_traits_of_ones_own_estimator_are_respected(beside: Path):
    with pytest.raises(RecipeErrors) as caught:
        tiny(beside, "rollout.samples=1", "algorithm.lam=0.9", **algorithm(advantage="median:median"))
    assert [error.path for error in caught.value.errors] == ["algorithm.lam", "rollout.samples"]
    text = "def silent(inputs): ..."
    assert written(beside, text, **algorithm(advantage="mine:silent", lam=0.9)).recipe.algorithm.lam == 0.9


def test_traits_of_ones_own_loss_are_respected(tmp_path: Path):
    text = """
from practicum.parts import policy_loss

@policy_loss(whole_sessions=True, reads=["clip_low"])
def mine(inputs): ...
"""
    written(tmp_path, text, **algorithm(loss="mine:mine", clip_low=0.1))
    assert loss_traits("mine:mine") == LossTraits(
        ratio=True, whole_sessions=True, reads=frozenset({"clip_low", "entropy"})
    )
    with pytest.raises(RecipeErrors) as caught:
        tiny(tmp_path, **algorithm(loss="mine:mine", clip_high=0.1))
    assert [error.path for error in caught.value.errors] == ["algorithm.clip_high"]


def test_a_check_of_ones_own_is_counted_or_stops_the_run(tmp_path: Path):
    text = "def always(metrics, batch): return f'{len(batch)} rows, reward {metrics[\"reward/mean\"]:.1f}'"
    sections: dict[str, Any] = {"train": {"steps": 1, "prompts": 2}, "eval": {"rows": 2}}
    train_loaded(
        written(tmp_path, text, checks={"level": "warn", "own": ["mine:always"]}, **sections),
        tmp_path / "run",
    )
    assert metrics_of(tmp_path / "run")[1]["checks/always"] == 1
    assert "check always: 8 rows, reward" in (tmp_path / "run/log.txt").read_text()
    watch = Watch(tiny(tmp_path, checks={"own": ["mine:always"]}).recipe.checks, lambda sentence: None)
    with pytest.raises(CheckError, match=r"check always: 0 rows"):
        watch.after_step({"reward/mean": 0.5}, BatchRef("train", (), ()))


def test_a_part_that_raises_shows_the_users_lines(tmp_path: Path):
    text = "def f(inputs):\n    return inputs.nothing\n"
    with pytest.raises(PracticumError) as caught:
        check_without_models(written(tmp_path, text, **algorithm(advantage="mine:f")).recipe)
    assert "AttributeError: 'AdvantageInputs' object has no attribute 'nothing'" in str(caught.value)
    assert 'mine.py", line 2, in f\n' in str(caught.value)
    assert "own_parts.py" not in str(caught.value)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a package of this name that has the page's estimator, as the page says."""

    def install(name: str) -> None:
        (entries,) = [block.text for block in blocks_of(PAGE, "toml")]
        (estimator,) = [block.text for block in blocks_of(PAGE, "python") if block.file == "median.py"]
        folder, info = tmp_path / "site" / name, tmp_path / f"site/{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "median.py").write_text(estimator)
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        text = entries.replace("my_package", name).replace('"', "").replace("[project.entry-points.", "[")
        (info / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install


def test_an_installed_package_registers_a_name(tmp_path: Path, package: Callable[[str], None]):
    package("first_package")
    loaded = tiny(tmp_path, "train.steps=1", **algorithm(advantage="median"))
    assert check_parts(loaded.recipe) == ["custom parts, each called once: algorithm.advantage median"]
    with pytest.raises(RecipeErrors, match="did you mean median"):
        tiny(tmp_path, **algorithm(advantage="medain"))
    with pytest.raises(
        RecipeErrors, match=r"'median' .*, expected one of supervised, ppo_clip.*, or package"
    ):
        tiny(tmp_path, **algorithm(loss="median"))


def test_a_name_of_two_packages_is_refused(tmp_path: Path, package: Callable[[str], None]):
    package("one_package")
    package("other_package")
    with pytest.raises(RecipeErrors, match=r"registered as o\w+_package.median:median and as o\w+_package"):
        tiny(tmp_path, **algorithm(advantage="median"))


def test_the_command_line_checks_parts_beside_the_recipe(beside: Path, monkeypatch: pytest.MonkeyPatch):
    tiny(beside, **ALL)
    (beside / "elsewhere").mkdir()
    monkeypatch.chdir(beside / "elsewhere")
    found = CliRunner().invoke(app, ["check", "../recipe.yaml", "--all"])
    assert found.exit_code == 0, found.output
    words = " ".join(found.output.split())
    assert (
        "each called once: algorithm.advantage median:median, algorithm.loss spo:spo, algorithm.aggr" in words
    )
    assert "algorithm.loss: ../spo.py" in words or f"algorithm.loss: {beside}/spo.py" in words
