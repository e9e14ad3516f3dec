"""The probe of teachers before a run, against sums over the vocabulary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.teachers.tiny_teachers import save_adapter, save_teacher, teachers_recipe

from practicum.models.load_model import load_model
from practicum.recipe.load_recipe import load_recipe
from practicum.roles.probe_teachers import Probe, compare, probe_teachers, warnings_of
from practicum.trainer.preflight import check_without_models, preflight


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


def test_teachers_elsewhere_are_not_probed(tmp_path: Path):
    student = save_teacher(tmp_path / "student", seed=1)
    url = {"url": "http://127.0.0.1:9/v1", "model": "x", "tokenizer": student}
    loaded = write(tmp_path, {"same": url, "other": {"student": {}}}, model={"path": student})
    lines, _ = probe_teachers(loaded.recipe, load_model(loaded.recipe.model, 0))
    assert [line.split()[0] for line in lines] == ["teacher", "other"]


def test_worse_and_distant_teachers_are_warned_about():
    good = Probe(0.9, 0.99, 0.001, 0.1, 0.2, (0.9, 0.5))
    worse, far = (
        Probe(0.9, 0.99, 0.0, 0.1, 0.2, (0.4, 0.5)),
        Probe(0.1, 0.3, 0.0, 0.1, 4.0, (math.nan, math.nan)),
    )
    assert warnings_of({"good": good}) == []
    assert [warning.split()[1] for warning in warnings_of({"worse": worse, "far": far})] == ["worse", "far"]


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
