"""Stages of users that ask teachers: what they write, against models that are called directly."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from practicum.dataplane.ragged import Columns, Ragged
from practicum.dataplane.stages import OwnStage
from practicum.engines.protocol import Counter, GenerateRequest, Sampling
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.load_model import load_model, stop_ids
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Model
from practicum.recipe.shipped import shipped_recipes
from practicum.recipe.user_functions import import_object
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.trainer.run import train_loaded
from tests.engines.engines import engine_of
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe

from .test_run import metrics_of

SORT = shipped_recipes() / "sort"
ROWS = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs")
KINDS = """
from practicum.parts import Draws, Example, Procedural, Settings

def make(draws: Draws, settings: Settings) -> Example:
    return Example(draws.text("abc", 4), "a")

EASY = Procedural("easy", "Anything is right.", {}, make, lambda text, answer, row: 1.0)
HARD = Procedural("hard", "Nothing is right.", {}, make, lambda text, answer, row: 0.0)
SOME = Procedural("some", "Half of it is right.", {}, make, lambda text, answer, row: float(is_even(text)))

def is_even(text: str) -> bool:
    return sum(map(ord, text)) % 2 == 0

def letters(sample) -> float:
    return float(len(sample.response_text))
"""


@pytest.fixture(autouse=True)
def forgotten(own_parts: None) -> None:
    """Parts of one test are not those of another."""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], **sections: Any) -> list[Any]:
    """Train one step; return key, tags and these columns of each row, as tensors by name."""
    found: list[Any] = []
    clear = RolloutRole.clear

    def keep(self: RolloutRole, step: StepInfo) -> None:
        batch = step.batch.real()
        columns = Columns("test", self.store.get(batch, fields))
        rows = zip(*(columns.ragged(name).rows for name in fields), strict=True)
        for key, tags, row in zip(batch.keys, batch.tags, rows, strict=True):
            found.append((key, tags, dict(zip(fields, row, strict=True))))
        clear(self, step)

    monkeypatch.setattr(RolloutRole, "clear", keep)
    path = folder / "recipe.yaml"
    train = {"steps": 1, "prompts": sections.pop("prompts", 6), "lr": 1e-3}
    path.write_text(yaml.safe_dump(teachers_recipe(train=train, **sections)))
    train_loaded(load_recipe(path), folder / "run")
    return found


@torch.no_grad()
def logits(model: str, row: dict[str, Tensor]) -> Tensor:
    """What a model in a folder says where the tokens of a response are drawn."""
    ids = torch.cat([row["prompt_ids"], row["response_ids"]])
    every = AutoModelForCausalLM.from_pretrained(model)(ids[None]).logits[0]
    return every[len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)


def said(model: str, row: dict[str, Tensor]) -> Tensor:
    return logits(model, row).gather(1, row["response_ids"][:, None])[:, 0]


def test_consensus_is_the_sign_that_no_teacher_opposes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = {name: save_teacher(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2))}
    rows = run(
        tmp_path,
        monkeypatch,
        (*ROWS, "advantages"),
        teachers={name: {"model": folder} for name, folder in folders.items()},
        route={"by": "task", "map": {"copy": "a", "compare": "b"}},
        distill={"divergence": "k1", "signal": "sampled", "apply_as": "advantage"},
        reward={"weight": 0.0},
        stages=[f"{SORT}/teacher_variants:consensus"],
    )
    seen = set()
    for _, tags, row in rows:
        ratios = {name: said(folder, row) - row["rollout_logprobs"] for name, folder in folders.items()}
        own, other = ratios.pop(tags.teacher), ratios.popitem()[1]
        for mine, its, advantage in zip(
            own.tolist(), other.tolist(), row["advantages"].tolist(), strict=True
        ):
            if min(abs(mine), abs(its), abs(abs(its) - 0.1)) < 1e-4:
                continue  # rounding decides
            vetoed = mine * its < 0 and abs(its) > 0.1
            assert advantage == (0.0 if vetoed else 1.0 if mine > 0 else -1.0)
            seen.add((mine > 0, vetoed))
    assert len(seen) == 4, "agreement and veto, up and down"


def test_the_gate_distils_what_the_teacher_solves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "kinds.py").write_text(KINDS)
    folder = save_teacher(tmp_path / "one", seed=1)
    sections: dict[str, Any] = {
        "tasks": {name: {"kind": f"kinds:{name.upper()}"} for name in ("easy", "hard", "some")},
        "teachers": {"one": {"model": folder}},
        "prompts": 24,
        "distill": {},
        "reward": {"functions": [{"use": "kinds:letters"}]},
        "algorithm": {"advantage": "dr_grpo"},
    }
    rows = run(
        tmp_path,
        monkeypatch,
        (*ROWS, "advantages", "teacher_weight"),
        stages=[f"{SORT}/teacher_variants:gate"],
        **sections,
    )
    rewards: dict[int, list[float]] = {}
    for key, tags, _ in rows:
        rewards.setdefault(key.prompt, []).append(tags.reward)
    assert {tags.task for _, tags, _ in rows} == {"easy", "hard", "some"}
    right = even_answers(folder, sorted({tuple(row["prompt_ids"].tolist()) for *_, row in rows}))
    found: set[int] = set()
    for key, tags, row in rows:
        count = right[tuple(row["prompt_ids"].tolist())]
        found |= {count} if tags.task == "some" else set()
        group, solved = rewards[key.prompt], tags.task == "easy" or (tags.task == "some" and count >= 2)
        centred = tags.reward - sum(group) / len(group)
        assert row["teacher_weight"].tolist() == [float(solved)] * len(row["response_ids"])
        expected = 0.0 if solved else centred
        assert row["advantages"].tolist() == pytest.approx([expected] * len(row["response_ids"]), abs=1e-5)
    taught = sum(bool(row["teacher_weight"].any()) for *_, row in rows) / len(rows)
    assert metrics_of(tmp_path / "run")[-1]["gate/taught"] == pytest.approx(taught)
    assert found >= {1, 2}, "one right answer is too few, two are enough"


def even_answers(folder: str, prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Return how many of a teacher's three answers to each prompt `SOME` finds right."""
    model, tokenizer = load_model(Model(path=folder, device="cpu"), 0), make_tokenizer()
    sampling = Sampling(6, stop_ids(model.generation_config, tokenizer))

    async def right(engine: TorchEngine, ids: tuple[int, ...]) -> int:
        number, count = zlib.crc32(array("q", ids).tobytes()), 0
        for session in range(3):
            request = GenerateRequest(list(ids), sampling, Counter(3, number, session))
            tokens = (await engine.generate(request)).tokens.tolist()
            count += sum(map(ord, str(tokenizer.decode(tokens, skip_special_tokens=True)))) % 2 == 0
        return count

    async def all_of(engine: TorchEngine) -> list[int]:
        return [await right(engine, ids) for ids in prompts]

    with engine_of(model) as engine:
        return dict(zip(prompts, asyncio.run(all_of(engine)), strict=True))


def test_a_teacher_that_a_stage_asks_writes_its_argmax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save_teacher(tmp_path / "one", seed=1)
    (tmp_path / "asking.py").write_text(
        "from practicum.parts import Counter, Field, GenerateRequest, Ragged, Sampling, stage\n"
        "import torch\n"
        "SAID = Field('said', 'int64', 'response', 'ask', 'greedy', padding='zero')\n"
        "@stage(after='pad', reads=['prompt_ids', 'response_ids'], writes=[SAID])\n"
        "def ask(rank, batch, columns, step):\n"
        "    lengths = columns.ragged('response_ids').lengths\n"
        "    asked = [GenerateRequest(row.tolist(), Sampling(n, frozenset(), greedy=True), Counter(0, 0))\n"
        "             for row, n in zip(columns.ragged('prompt_ids').rows, lengths)]\n"
        "    said = rank.teachers.answers_by('one', asked)\n"
        "    return {'said': Ragged.packed(torch.tensor(sum(said, [])), lengths)}\n"
    )
    rows = run(
        tmp_path,
        monkeypatch,
        (*ROWS, "said"),
        teachers={"one": {"model": folder}},
        distill={},
        reward={"weight": 0.0},
        stages=["asking:ask"],
    )
    for _, _, row in rows:
        answer = {"prompt_ids": row["prompt_ids"], "response_ids": row["said"]}
        assert torch.equal(logits(folder, answer).argmax(-1), row["said"])


@pytest.mark.parametrize("chosen", ["variants:top_entropy", "teacher_variants:teachable"])
def test_a_fifth_of_the_tokens_has_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str):
    student, teacher = (save_teacher(tmp_path / name, seed=seed) for name, seed in (("s", 4), ("t", 1)))
    rows = run(
        tmp_path,
        monkeypatch,
        (*ROWS, "token_weight"),
        model={"path": student},
        teachers={"one": {"model": teacher}},
        distill={},
        reward={"weight": 0.0},
        stages=[f"{SORT}/{chosen}"],
    )
    pairs: list[tuple[float, float]] = []
    for _, _, row in rows:
        own = logits(student, row)
        values = -(own.exp() * own).sum(-1)
        if chosen.endswith("teachable"):
            values = (said(teacher, row) - said(student, row)).abs()
        pairs += zip(values.tolist(), row["token_weight"].tolist(), strict=True)
    pairs.sort(reverse=True)
    count = round(0.2 * len(pairs))
    assert {weight for _, weight in pairs} == {0.0, 1.0}
    assert sum(weight for _, weight in pairs) == pytest.approx(count, abs=1)
    assert all(weight == 1.0 for _, weight in pairs[: count - 1])


def test_tool_output_is_learnt_and_special_tokens_are_not():
    stage = import_object(f"{SORT}/variants:tool_output", "here")
    assert isinstance(stage, OwnStage)
    tokenizer = make_tokenizer()
    letters, end = tokenizer.encode("abc", add_special_tokens=False), tokenizer.eos_token_id
    ids, mask = [[*letters, end], [letters[0], end]], [[True, False, True, False], [False, True]]
    columns = {"response_ids": ids, "response_mask": mask}
    given = {name: Ragged.from_rows([torch.tensor(row) for row in rows]) for name, rows in columns.items()}
    found = stage.run(SimpleNamespace(tokenizer=tokenizer), None, Columns("test", given), None)
    weights = [row.tolist() for row in found["token_weight"].rows]
    assert weights == [pytest.approx([1.0, 0.1, 1.0, 0.0]), pytest.approx([0.1, 0.0])]


def test_mismatched_chunks_share_their_difference_evenly_and_all_agree_on_average():
    include, leave_out = (
        import_object(f"{shipped_recipes()}/many_teachers/mismatched:{name}", "here")
        for name in ("include", "leave_out")
    )
    assert isinstance(include, OwnStage)
    assert isinstance(leave_out, OwnStage)
    own, teacher = [[-1.0, -2.0, -0.5, -3.0, -0.1], [-1.0]], [[-0.7, 0.0, -1.5, -4.0, 0.0], [-0.2]]
    match = [[5, 0, 4, 0, 0], [1]]  # one chunk of two tokens, one of one, and a token that is never compared
    given = {"rollout_logprobs": own, "teacher_logprobs": teacher, "teacher_match": match}
    given |= {"response_mask": [[True] * 5, [True]]}
    columns = {name: Ragged.from_rows([torch.tensor(row) for row in rows]) for name, rows in given.items()}
    found = include.run(None, None, Columns("test", columns), None)
    assert [row.tolist() for row in found["teacher_match"].rows] == [[1, 1, 1, 1, 0], [1]]
    shift = (-0.3 - 0.5 - 0.5 + 1.0 - 0.8) / 5
    expected = torch.tensor([-0.7, -2.0 + 0.5, -0.5 + 0.5, -4.0, 0.0, -0.2]) + shift
    torch.testing.assert_close(found["teacher_logprobs"].values, expected)
    out = leave_out.run(None, None, Columns("test", columns), None)
    assert out["teacher_match"].values.tolist() == [5, 0, 4, 0, 0, 1]
    strict = torch.tensor([-0.7, -0.2]) + (-0.3 - 0.8) / 2
    torch.testing.assert_close(out["teacher_logprobs"].values[[0, 5]], strict)


def test_the_student_that_is_told_the_answer_teaches_the_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    student, tokenizer = save_teacher(tmp_path / "student", seed=4), make_tokenizer()
    rows = run(
        tmp_path,
        monkeypatch,
        (*ROWS, "advantages"),
        model={"path": student},
        tasks={"sort": {"kind": "sort", "options": {"length": [2, 4]}}},
        reward={"functions": [{"use": "checker"}]},
        algorithm={"advantage": "grpo"},
        stages=[f"{SORT}/teacher_variants:opsd"],
    )
    largest = 0.0
    for _, _, row in rows:
        digits = str(tokenizer.decode(row["prompt_ids"])).partition(":")[2].removesuffix("=")
        told = tokenizer.encode("".join(sorted(digits)) + ">", add_special_tokens=False)
        before = {"prompt_ids": torch.cat([torch.tensor(told), row["prompt_ids"]])}
        expected = said(student, row | before) - said(student, row)
        torch.testing.assert_close(row["advantages"], expected, rtol=0, atol=1e-4)
        largest = max(largest, float(expected.abs().max()))
    assert largest > 0.1
