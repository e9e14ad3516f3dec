"""The probe of teachers before a run, against sums over the vocabulary."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.serving.servers import MODEL, served
from tests.teachers.tiny_teachers import save_adapter, save_teacher, teachers_recipe
from tests.trainer.test_run import metrics_of, weights_of
from transformers import AutoModelForCausalLM

from practicum.engines.protocol import Scores
from practicum.models.adapter_files import SavedAdapter
from practicum.models.load_model import load_model
from practicum.models.lora import put_adapters
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.roles.probe_teachers import (
    Probe,
    compare,
    compare_most_likely,
    probe_teachers,
    table,
    warnings_of,
)
from practicum.tasks.stream import make_stream
from practicum.trainer.preflight import check_without_models, preflight
from practicum.trainer.run import train_loaded

TIMED = re.compile(r"^time/|tokens_per_second|/seconds$|^shared/|^teachers/overlap_fraction$")
"""Metrics that the clock makes."""


def test_the_numbers_are_sums_over_the_vocabulary():
    torch.manual_seed(0)
    student, teacher = (torch.randn(5, 9).log_softmax(-1) for _ in range(2))
    found = compare(student, teacher, 3, (0.5, 0.25))
    overlap = mass = tail = kl = gap = 0.0
    for p, q in zip(student.exp().tolist(), teacher.exp().tolist(), strict=True):
        own, best = (set(sorted(range(9), key=x.__getitem__)[-3:]) for x in (p, q))
        overlap += len(own & best) / 3 / 5
        mass += sum(q[i] for i in own) / 5
        tail += (1 - sum(q[i] for i in best)) / 5
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 5
        gap += sum(b * math.log(b) - a * math.log(a) for a, b in zip(p, q, strict=True)) / 5
    numbers = (found.overlap, found.mass, found.tail, found.kl, found.entropy_gap)
    assert numbers == pytest.approx((overlap, mass, tail, kl, gap), abs=1e-5)
    assert found.signal == "full"


def write(folder: Path, teachers: dict[str, Any], **more: Any):
    path = folder / "recipe.yaml"
    route = {"by": "task", "map": {"copy": "same", "compare": "other"}}
    sections = {"teachers": teachers, "route": route, "distill": {}, **more}
    path.write_text(yaml.safe_dump(teachers_recipe(**sections)))
    return load_recipe(path)


def test_check_shows_a_line_for_each_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    student = save_teacher(tmp_path / "student", seed=1)
    other = save_teacher(tmp_path / "other", seed=2, scale=20.0)
    teachers = {"same": {"student": {}}, "other": {"model": other, "placement": "own"}}
    loaded = write(tmp_path, teachers, model={"path": student})
    title, apart, same = (line.split() for line in preflight(loaded).findings[:3])
    assert title[:3] == ["teacher", "overlap", "mass"]
    assert same[:2] == ["same", "1.00"]
    assert same[4:6] == ["+0.00", "0.000"], "a copy of the student says what it says"
    assert apart[0] == "other"
    assert float(apart[5]) > 0.1


def test_an_adapter_is_compared_without_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    student = save_teacher(tmp_path / "student", seed=1)
    save_adapter(tmp_path / "adapter", student, seed=2)
    teachers = {"same": {"student": {}}, "other": {"adapter": str(tmp_path / "adapter")}}
    loaded = write(tmp_path, teachers, model={"path": student})
    lines, _ = probe_teachers(loaded.recipe, load_model(loaded.recipe.model, 0))
    found = {line.split()[0]: line.split()[1:] for line in lines}
    assert float(found["other"][4]) > 0 == float(found["same"][4])
    assert (found["other"][5] == "–") != (found["same"][5] == "–")


def row_of(recipe: Recipe, name: str) -> list[str]:
    lines, _ = probe_teachers(recipe, load_model(recipe.model, 0))
    return next(line.split() for line in lines if line.split()[0] == name)


def test_a_served_teacher_shows_what_its_server_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    student, other = (save_teacher(tmp_path / str(seed), seed=seed, scale=9.0) for seed in (1, 2))
    here = {"same": {"student": {}}, "other": {"model": other}}
    model, distill = {"path": student}, {"top_k": 3}
    local = row_of(write(tmp_path, here, model=model, distill=distill).recipe, "other")
    with served(load_model(Model(path=other, device="cpu"), 0)) as server:
        there = here | {"other": {"url": server.url, "model": MODEL, "tokenizer": student}}
        remote = row_of(write(tmp_path, there, model=model, distill=distill).recipe, "other")
        sampled = write(
            tmp_path, there, model=model, distill={"signal": "sampled", "divergence": "k1_straight"}
        )
        of_20 = row_of(sampled.recipe, "other")
        monkeypatch.setattr("practicum.roles.probe_teachers.SERVED_K", 64)  # the server has 63
        of_none = row_of(sampled.recipe, "other")
    overlap, mass, tail, gap, kl, *scores, signal = remote[1:]
    assert (overlap, tail, scores) == (local[1], local[3], local[6:8])
    assert 0 < float(mass.removeprefix("≥")) <= float(local[2])
    assert gap == "–"
    assert float(kl.removeprefix("~")) == pytest.approx(float(local[5]), rel=0.5)
    assert (local[8], signal) == ("full", "sampled")
    assert of_20[1] != "–"
    assert of_none[1:5] == ["–"] * 4
    assert of_none[5:8] == of_20[5:8] == [kl, *scores]


def test_a_served_adapter_only_scores(tmp_path: Path):
    student = save_teacher(tmp_path / "student", seed=1)
    save_adapter(tmp_path / "adapter", student, seed=2)
    saved = SavedAdapter.read(str(tmp_path / "adapter"), "adapter")
    base = load_model(Model(path=student, device="cpu"), 0)
    put_adapters(base, {saved.fingerprint: saved}, student)
    with served(base, adapters={"tuned": saved.fingerprint}) as server:
        url = {"url": server.url, "model": "tuned", "tokenizer": student}
        loaded = write(tmp_path, {"same": {"student": {}}, "other": url}, model={"path": student})
        found = row_of(loaded.recipe, "other")
    assert found[6] == "–"
    assert float(found[5].removeprefix("~")) > 0


def test_the_numbers_of_a_server_are_bounds_and_an_estimate():
    torch.manual_seed(1)
    student, teacher = (torch.randn(1, 9).double().log_softmax(-1) for _ in range(2))
    best, ids = teacher.topk(3)
    probes = [
        compare_most_likely(
            student, Scores(teacher[:, token], ids, best, 0), torch.tensor([token]), (0.5, 0.25)
        )
        for token in range(9)
    ]
    kl = sum(float(p) * probe.kl for p, probe in zip(student[0].exp(), probes, strict=True))
    whole, found = compare(student, teacher, 3, (0.5, 0.25)), probes[0]
    assert kl == pytest.approx(whole.kl, abs=1e-9), "its expectation is the KL"
    assert (found.overlap, found.tail) == pytest.approx((whole.overlap, whole.tail))
    both = set(ids[0].tolist()) & set(student[0].topk(3).indices.tolist())
    assert found.mass == pytest.approx(sum(float(teacher[0, token].exp()) for token in both))
    assert found.mass <= whole.mass <= found.mass + found.tail


def test_the_first_step_of_a_run_shows_served_teachers_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    student, other = (save_teacher(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    with served(load_model(Model(path=other, device="cpu"), 0)) as server:
        url = {"url": server.url, "model": MODEL, "tokenizer": student}
        loaded = write(tmp_path, {"same": {"student": {}}, "other": url}, model={"path": student})
        found = [line for line in preflight(loaded).findings if line.split()[0] in ("same", "other")]
        train_loaded(loaded, tmp_path / "plain")
        monkeypatch.setattr("practicum.trainer.run.PROBED_STEPS", 1)
        train_loaded(loaded, tmp_path / "probed")
    log = (tmp_path / "probed" / "log.txt").read_text()
    assert len(found) == 2
    assert all(line in log for line in found)
    assert found[0] not in (tmp_path / "plain" / "log.txt").read_text()
    one, other = weights_of(tmp_path / "plain"), weights_of(tmp_path / "probed")
    assert all(torch.equal(one[name], other[name]) for name in one)
    plain, probed = (
        [{key: x for key, x in row.items() if not TIMED.search(key)} for row in metrics_of(tmp_path / run)]
        for run in ("plain", "probed")
    )
    assert plain == probed


def test_all_teachers_of_a_mixture_are_probed(tmp_path: Path):
    student, other = (save_teacher(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    teachers = {"a": {"model": other, "mixture": {"a": 0.5, "b": 0.5}}, "b": {"model": student}}
    route = {"by": "task", "map": {"copy": "a", "compare": "a"}}
    distill = {"signal": "sampled", "divergence": "k1_straight"}
    loaded = write(tmp_path, teachers, model={"path": student}, route=route, distill=distill)
    lines, _ = probe_teachers(loaded.recipe, load_model(loaded.recipe.model, 0))
    assert [line.split()[0] for line in lines] == ["teacher", "a", "b"]


def test_worse_and_distant_teachers_are_warned_about():
    good = Probe(0.9, 0.99, 0.001, 0.1, 0.2, (0.9, 0.5))
    worse, far = (
        Probe(0.9, 0.99, 0.0, 0.1, 0.2, (0.4, 0.5)),
        Probe(0.1, 0.3, 0.0, 0.1, 4.0, (math.nan, math.nan)),
    )
    assert warnings_of({"good": good}) == []
    assert [warning.split()[1] for warning in warnings_of({"worse": worse, "far": far})] == ["worse", "far"]


def test_templates_are_in_the_table_if_prompts_have_any():
    probe = Probe(0.9, 0.99, 0.001, 0.1, 0.2, (0.9, 0.5))
    plain, chats = table({"a": probe}, {}), table({"a": probe}, {"b": "same", "a": "other, can think"})
    assert [
        line + end for line, end in zip(plain, ("  template", "   other, can think"), strict=True)
    ] == chats


@pytest.mark.parametrize("strength", [1.25, 1.5])
def test_an_exponent_beyond_what_worked_is_warned_about(tmp_path: Path, strength: float):
    student, other = (
        save_teacher(tmp_path / name, seed=seed) for seed, name in enumerate(("student", "other"))
    )
    target = {"other": strength, "same": 1 - strength}
    teachers = {"same": {"student": {}}, "other": {"model": other, "target": target}}
    route = {"by": "task", "map": {"copy": "other", "compare": "other"}}
    distill = {"signal": "full"}
    loaded = write(tmp_path, teachers, model={"path": student}, route=route, distill=distill)
    found = check_without_models(loaded.recipe).warnings
    assert any("teachers.other.target" in warning for warning in found) == (strength > 1.25)


THIRD = """
from practicum.parts import Draws, Example, Procedural, Settings

def make(draws: Draws, settings: Settings) -> Example:
    return Example(draws.text("abc", 4), "a")

def check(text: str, answer: str, row: object) -> float:
    return float(sum(map(ord, text)) % 3 == 0)

THIRD = Procedural("third", "A third is right.", {}, make, check)
"""


@torch.no_grad()
def greedy_score(folder: str, prompts: Sequence[str]) -> float:
    """Share of a model's greedy responses that `THIRD` finds right."""
    model, tokenizer, right = AutoModelForCausalLM.from_pretrained(folder), make_tokenizer(), 0
    for prompt in prompts:
        ids, start = tokenizer.encode(prompt), len(tokenizer.encode(prompt))
        while len(ids) - start < 6 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        text = str(tokenizer.decode(ids[start:], skip_special_tokens=True))
        right += sum(map(ord, text)) % 3 == 0
    return right / len(prompts)


def test_a_teacher_that_answers_worse_is_named_with_both_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_parts: None
):
    (tmp_path / "kinds.py").write_text(THIRD)
    folders = [save_teacher(tmp_path / str(seed), seed=seed, scale=9.0) for seed in (1, 2)]
    found: list[tuple[str, ...]] = []
    for student, other in (folders, folders[::-1]):
        path = tmp_path / "recipe.yaml"
        sections = {"tasks": {"third": {"kind": "kinds:THIRD"}}, "teachers": {"other": {"model": other}}}
        path.write_text(yaml.safe_dump(teachers_recipe(model={"path": student}, distill={}, **sections)))
        recipe = load_recipe(path).recipe
        prompts = [str(prompt.content) for prompt in make_stream(recipe.tasks, recipe.seed).take(8)]
        (_, line), warnings = probe_teachers(recipe, load_model(recipe.model, 0))
        scores = greedy_score(other, prompts), greedy_score(student, prompts)
        found.append(tuple(line.split()[6:8]))
        assert found[-1] == tuple(f"{score:.2f}" for score in scores)
        assert any(warning.startswith("teacher other scores less") for warning in warnings) == (
            scores[0] < scores[1]
        )
    assert found[0] == found[1][::-1]
    assert found[0][0] != found[0][1], "one of them is worse"
