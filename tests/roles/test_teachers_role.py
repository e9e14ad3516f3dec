"""Rows find their teachers, are scored, and whatever happens nobody is left awake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.servers import MODEL, served
from tests.teachers.models import in_process
from tests.teachers.scoring_server import scoring_server
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe
from tests.trainer.loops import two_trajectories

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import ScoreOptions, ScoreRequest
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError, TeacherError
from practicum.models.attention import OutputHead
from practicum.models.load_model import load_model
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.roles.teachers import TeacherRole
from practicum.runtime.local import LocalRoles, LocalWorkers, start_local
from practicum.sessions.session import Session
from practicum.tasks.stream import make_stream
from practicum.teachers.load_teachers import Teachers
from practicum.trainer.sample_step import TRAIN, training_attempts

ROUTE = {"by": "task", "map": {"copy": "small", "compare": "wide"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two teachers of different hidden sizes."""
    root = tmp_path_factory.mktemp("teachers")
    return {
        "small": save_teacher(root / "small", seed=1),
        "wide": save_teacher(root / "wide", seed=2, hidden=48),
    }


def recipe_of(folders: dict[str, str], *, each: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    teachers = {name: {"model": folder, **(each or {})} for name, folder in folders.items()}
    return Recipe.model_validate(
        teachers_recipe(teachers=teachers, **{"route": ROUTE, "distill": {}} | sections)
    )


@contextmanager
def started(recipe: Recipe) -> Iterator[tuple[LocalRoles, TeacherRole]]:
    roles = start_local(recipe, make_plan(recipe), Watch(recipe.checks, print))
    assert roles.rank.teachers is not None
    try:
        yield roles, roles.rank.teachers
    finally:
        roles.close()


def local_workers(roles: LocalRoles) -> LocalWorkers:
    assert isinstance(roles.rollout.workers, LocalWorkers)
    return roles.rollout.workers


def roll_out(recipe: Recipe, roles: LocalRoles, prompts: int = 6) -> BatchRef:
    drawn = make_stream(recipe.tasks, recipe.seed).take(prompts)
    attempts = training_attempts(recipe, drawn, roles.stop)
    return roles.rollout.rollout(attempts, TRAIN, seed=recipe.seed)


def teach(faculty: TeacherRole, roles: LocalRoles, batch: BatchRef) -> None:
    roles.stages["teachers"](StepInfo(batch, prompts=roles.rollout.prompts))


def ragged(roles: LocalRoles, batch: BatchRef, *names: str) -> list[Ragged]:
    columns = roles.store.get(batch, names)
    found = [columns[name] for name in names]
    assert all(isinstance(column, Ragged) for column in found)
    return [column for column in found if isinstance(column, Ragged)]


def engines_of(staff: Teachers) -> dict[str, TorchEngine]:
    return {n: s.sleeper for n, s in staff.scorers.items() if isinstance(s.sleeper, TorchEngine)}


def assert_at_rest(roles: LocalRoles, faculty: TeacherRole) -> None:
    """Teachers sleep, the student's engine does not, and it works."""
    assert not [name for name, engine in engines_of(faculty.loaded).items() if engine.awake]
    assert roles.engine.memory().kv > 0
    assert isinstance(roles.engine, TorchEngine)
    assert roles.engine.idle


def test_a_target_is_the_normalised_product_of_its_teachers(folders: dict[str, str]):
    recipe = recipe_of(folders, distill={"signal": "full"}, rollout={"samples": 2, "temperature": 0.7})
    exponents = {"small": 1.25, "wide": -0.25}
    small = recipe.teachers["small"].model_copy(update={"target": exponents})
    product = recipe.model_copy(update={"teachers": recipe.teachers | {"small": small}})
    with started(product) as (roles, faculty):
        batch = roll_out(product, roles)
        teach(faculty, roles, batch)
        names = ("prompt_ids", "response_ids", "teacher_logprobs", "teacher_hidden")
        prompts, responses, logprobs, hidden = ragged(roles, batch, *names)
        teaching = roles.rank.student.learner.objective.teaching
    assert teaching is not None
    assert hidden.values.shape[1] == faculty.loaded.width == 32 + 48
    models = {name: load_model(Model(path=path, device="cpu"), 0) for name, path in folders.items()}
    for i, tags in enumerate(batch.tags):
        ids, start = torch.cat([prompts[i], responses[i]]), len(prompts[i]) - 1
        with torch.no_grad():
            by_each = {
                n: m(input_ids=ids[None]).logits[0, start:-1].double() / 0.7 for n, m in models.items()
            }
        used = exponents if tags.teacher == "small" else {"wide": 1.0}
        wanted_RV = (
            torch.stack([e * by_each[n].log_softmax(-1) for n, e in used.items()]).sum(0).log_softmax(-1)
        )
        wanted_R = wanted_RV.gather(1, responses[i][:, None]).squeeze(1)
        torch.testing.assert_close(logprobs[i].double(), wanted_R, rtol=0, atol=1e-5)
        learnt_RV = teaching.heads[["small", "wide"].index(tags.teacher or "")](hidden[i]).double() / 0.7
        torch.testing.assert_close(learnt_RV.log_softmax(-1), wanted_RV, rtol=0, atol=1e-5)


def test_a_base_that_is_the_reference_leaves_the_bits_of_the_teacher(folders: dict[str, str]):
    models = {name: load_model(Model(path=path, device="cpu"), 0) for name, path in folders.items()}
    heads = {name: OutputHead.of(models[name]) for name in ("small", "wide")}
    heads |= {"reference": heads["wide"]}
    hidden = {name: torch.randn(5, head.weight.shape[1]) for name, head in heads.items()}
    hidden["reference"] = hidden["wide"]
    exponents = {"small": 1.0, "reference": 1.0, "wide": -1.0}
    product = Teachers({}, None, heads, targets={"small": exponents}).head("small")
    found = product(torch.cat([hidden[name] for name in exponents], 1))
    assert torch.equal(found, Teachers({}, None, heads).head("small")(hidden["small"]))


@pytest.mark.parametrize("signal", ["sampled", "student_top_k"])
def test_a_mixture_is_the_weighted_sum_of_its_teachers_distributions(folders: dict[str, str], signal: str):
    top_k = {"top_k": 5} if signal == "student_top_k" else {"divergence": "k2"}
    recipe = recipe_of(
        folders,
        distill={"signal": signal, **top_k},
        route={"by": "task", "map": {"copy": "small", "compare": "wide"}},
    )
    small = recipe.teachers["small"].model_copy(update={"mixture": {"small": 0.7, "wide": 0.3}})
    mixed = recipe.model_copy(update={"teachers": recipe.teachers | {"small": small}})
    with started(mixed) as (roles, faculty):
        batch = roll_out(mixed, roles)
        teach(faculty, roles, batch)
        names = ["prompt_ids", "response_ids", "teacher_logprobs"]
        names += ["rollout_topk_ids", "teacher_topk_ids", "teacher_topk_logprobs"] * (signal != "sampled")
        prompts, responses, logprobs, *tops = ragged(roles, batch, *names)
        assert_at_rest(roles, faculty)
    models = {name: load_model(Model(path=path, device="cpu"), 0) for name, path in folders.items()}
    for i, tags in enumerate(batch.tags):
        ids = [*prompts[i].tolist(), *responses[i].tolist()]
        row = ScoreRequest(ids, len(prompts[i]), "row")
        said = []
        for model in models.values():
            whole = in_process(model, [row], ScoreOptions(top_k=model.config.vocab_size))[0]
            assert whole.topk_ids is not None
            assert whole.topk_logprobs is not None
            said.append(
                torch.zeros_like(whole.topk_logprobs).scatter(1, whole.topk_ids, whole.topk_logprobs).exp()
            )
        expected = (0.7 * said[0] + 0.3 * said[1] if tags.teacher == "small" else said[1]).log()
        at_R1 = responses[i].unsqueeze(1)
        torch.testing.assert_close(logprobs[i], expected.gather(1, at_R1).squeeze(1), rtol=0, atol=1e-5)
        if tops:
            assert torch.equal(tops[0][i], tops[1][i])
            torch.testing.assert_close(tops[2][i], expected.gather(1, tops[0][i]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("signal", ["sampled", "top_k", "full"])
def test_rows_are_scored_by_their_own_teacher(folders: dict[str, str], signal: str):
    divergence = "k2" if signal == "sampled" else "reverse_kl"
    top_k = {"top_k": 4} if signal == "top_k" else {}
    recipe = recipe_of(folders, distill={"divergence": divergence, "signal": signal, **top_k})
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        teach(faculty, roles, batch)
        prompts, responses, logprobs = ragged(roles, batch, "prompt_ids", "response_ids", "teacher_logprobs")
        extra = {"sampled": (), "top_k": ("teacher_topk_ids",), "full": ("teacher_hidden",)}[signal]
        more = ragged(roles, batch, *extra)
        assert_at_rest(roles, faculty)
    assert {tags.teacher for tags in batch.tags} == {"small", "wide"}
    wanted = ScoreOptions(top_k=4 if signal == "top_k" else 0, hidden=signal == "full")
    models = {name: load_model(Model(path=path, device="cpu"), 0) for name, path in folders.items()}
    for i, (key, tags) in enumerate(batch):
        name = {"copy": "small", "compare": "wide"}[tags.task]
        assert tags.teacher == name
        ids = [*prompts[i].tolist(), *responses[i].tolist()]
        row = ScoreRequest(ids, len(prompts[i]), str(key))
        expected = in_process(models[name], [row], wanted)[0]
        assert torch.equal(logprobs[i], expected.logprobs)
        if signal == "top_k":
            assert expected.topk_ids is not None
            assert torch.equal(more[0][i], expected.topk_ids)
        if signal == "full":
            assert expected.hidden is not None
            width = expected.hidden.shape[1]
            assert more[0][i].shape[1] == 48
            assert torch.equal(more[0][i][:, :width], expected.hidden)
            assert not more[0][i][:, width:].any()


def test_each_teacher_with_rows_is_woken_once_and_no_other(folders: dict[str, str]):
    recipe = recipe_of(folders)
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        teach(faculty, roles, batch)
        assert faculty.loaded.wakes == {"small": 1, "wide": 1}
        seconds, wakes = faculty.spent()
        assert wakes == {"small": 1, "wide": 1}
        assert all(s > 0 for s in seconds.values())
        teach(faculty, roles, batch.where(lambda _, tags: tags.teacher == "wide"))
        assert faculty.loaded.wakes == {"small": 1, "wide": 2}
        seconds, wakes = faculty.spent()
        assert wakes == {"small": 0, "wide": 1}
        assert seconds["small"] == 0


def test_a_step_without_rows_wakes_nobody(folders: dict[str, str]):
    recipe = recipe_of(folders)
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        teach(faculty, roles, batch.take([]))
        assert faculty.loaded.wakes == {"small": 0, "wide": 0}
        assert_at_rest(roles, faculty)


def by_hand(roles: LocalRoles, responses: list[list[int]], teachers: list[str]) -> BatchRef:
    """Rows with these responses in the store."""
    tags = tuple(
        Tags(teacher=name, response_tokens=len(r)) for name, r in zip(teachers, responses, strict=True)
    )
    batch = BatchRef(TRAIN, tuple(Key(i) for i in range(len(tags))), tags)
    ids = Ragged.from_rows([torch.tensor(r, dtype=torch.int64) for r in responses])
    prompts = Ragged.from_rows([torch.tensor([10, 11, 12])] * len(tags))
    roles.store.put(batch, {"prompt_ids": prompts, "response_ids": ids})
    return batch


@pytest.mark.parametrize("signal", ["top_k", "full"])
def test_rows_without_response_tokens_have_empty_scores(folders: dict[str, str], signal: str):
    recipe = recipe_of(folders, distill={"signal": signal})
    with started(recipe) as (roles, faculty):
        batch = by_hand(roles, [[], [7, 8], []], ["small", "small", "wide"])
        teach(faculty, roles, batch)
        names = ["teacher_logprobs", *(["teacher_topk_ids"] if signal == "top_k" else ["teacher_hidden"])]
        assert all(column.lengths == [0, 2, 0] for column in ragged(roles, batch, *names))
        assert_at_rest(roles, faculty)


def test_a_teacher_that_fails_is_named_and_nobody_stays_awake(folders: dict[str, str]):
    async def fails(*_: object, **__: object) -> None:
        raise EngineError("out of memory")

    recipe = recipe_of(folders, runtime={"threads": 1, "teachers_gb": 1e-6})
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        engines_of(faculty.loaded)["wide"].score = fails  # pyright: ignore
        with pytest.raises(TeacherError, match=r"teacher wide failed in prompt \d+.*: out of memory"):
            teach(faculty, roles, batch)
        assert_at_rest(roles, faculty)
        assert faculty.loaded.residency is not None
        assert {faculty.loaded.residency.level(name) for name in folders} == {"disk"}
        assert len(roll_out(recipe, roles)) == len(batch), "the student can go on"


def test_a_step_of_an_engine_that_raises_is_the_teachers_error(folders: dict[str, str]):
    def fails(*_: object) -> None:
        raise RuntimeError("a bad kernel")

    recipe = recipe_of(folders)
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        engines_of(faculty.loaded)["small"].thread._step = fails  # pyright: ignore
        with pytest.raises(TeacherError, match=r"teacher small failed in .*a bad kernel"):
            teach(faculty, roles, batch)
        assert_at_rest(roles, faculty)


def test_a_teacher_that_hangs_is_named_at_its_deadline_and_nobody_stays_awake(folders: dict[str, str]):
    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    recipe = recipe_of(folders, each={"deadline_s": 0.3})
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        engines_of(faculty.loaded)["wide"].score = hangs  # pyright: ignore
        with pytest.raises(TeacherError, match=r"teacher wide did not answer for .* within 0\.3 s"):
            teach(faculty, roles, batch)
        assert_at_rest(roles, faculty)


def test_a_forward_call_that_ends_after_the_deadline_does_not_keep_the_teacher_awake(folders: dict[str, str]):
    release = threading.Event()
    recipe = recipe_of(folders, each={"deadline_s": 0.2})
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        desk = engines_of(faculty.loaded)["small"].thread
        step = desk._step

        def late(jobs: list) -> Any:
            release.wait(20)
            return step(jobs)

        desk._step = late
        threading.Timer(0.6, release.set).start()
        with pytest.raises(TeacherError, match=r"teacher small did not answer for"):
            teach(faculty, roles, batch)
        assert_at_rest(roles, faculty)


def test_weights_on_disk_that_can_not_be_read_are_the_teachers_error(folders: dict[str, str]):
    recipe = recipe_of(folders, runtime={"threads": 1, "teachers_gb": 1e-6})
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles)
        shelf = engines_of(faculty.loaded)["wide"].offloaded
        assert shelf is not None
        assert shelf._file is not None
        shelf._file.truncate(10)
        with pytest.raises(EngineError, match=r"wide can't be woken: .*cut short"):
            teach(faculty, roles, batch)
        assert_at_rest(roles, faculty)


def test_what_only_the_teacher_reads_comes_before_the_prompt(folders: dict[str, str]):
    teachers = {"small": {"model": folders["small"], "prompt_prefix": "it is {answer}:"}}
    recipe = Recipe.model_validate(teachers_recipe(teachers=teachers, distill={}))
    with started(recipe) as (roles, faculty):
        batch = roll_out(recipe, roles, prompts=2)
        teach(faculty, roles, batch)
        prompts, responses, logprobs = ragged(roles, batch, "prompt_ids", "response_ids", "teacher_logprobs")
        answers = [str(roles.rollout.prompts[key].answer) for key in batch.keys]
        encode = roles.rank.tokenizer.encode
        before = [encode(f"it is {answer}:", add_special_tokens=False) for answer in answers]
    model = load_model(Model(path=folders["small"], device="cpu"), 0)
    for i, key in enumerate(batch.keys):
        ids = [*before[i], *prompts[i].tolist(), *responses[i].tolist()]
        row = ScoreRequest(ids, len(before[i]) + len(prompts[i]), str(key))
        assert torch.equal(logprobs[i], in_process(model, [row], ScoreOptions())[0].logprobs)


@pytest.mark.parametrize("streamed", [False, True], ids=["colocated", "streamed"])
def test_every_trajectory_of_a_session_is_scored(folders: dict[str, str], streamed: bool):
    model = load_model(Model(path=folders["small"], device="cpu"), 0)
    with served(model) as server:
        one = {"url": server.url, "model": MODEL} if streamed else {"model": folders["small"]}
        recipe = Recipe.model_validate(
            teachers_recipe(teachers={"small": one}, distill={"divergence": "k2", "signal": "sampled"})
        )
        with started(recipe) as (roles, faculty):
            local_workers(roles).sessions.loop = two_trajectories
            batch = roll_out(recipe, roles, prompts=3)
            assert len(batch) == 3 * 2 * 2
            if not streamed:
                teach(faculty, roles, batch)
            prompts, responses, logprobs = ragged(
                roles, batch, "prompt_ids", "response_ids", "teacher_logprobs"
            )
    assert {key.trajectory for key in batch.keys} == {0, 1}
    for i, key in enumerate(batch.keys):
        ids = [*prompts[i].tolist(), *responses[i].tolist()]
        expected = in_process(model, [ScoreRequest(ids, len(prompts[i]), str(key))], ScoreOptions())[0]
        torch.testing.assert_close(logprobs[i], expected.logprobs, rtol=0, atol=1e-6)


def test_a_streamed_teacher_that_fails_cancels_the_rollout_and_its_error_surfaces(folders: dict[str, str]):
    cancelled: list[int] = []

    async def loop(session: Session) -> None:
        await session.generate(max_new_tokens=2)
        if session.prompt.uid or session.index:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(session.index)

    model = load_model(Model(path=folders["small"], device="cpu"), 0)
    with scoring_server(model, fails_first=10**6, fail_status=400) as server:
        teachers = {"small": {"url": server.url, "model": MODEL}}
        recipe = Recipe.model_validate(
            teachers_recipe(teachers=teachers, distill={"divergence": "k2", "signal": "sampled"})
        )
        with started(recipe) as (roles, faculty):
            local_workers(roles).sessions.loop = loop
            with pytest.raises(TeacherError, match=r"teacher small at http.*prompt 0/session 0.*status 400"):
                roll_out(recipe, roles, prompts=3)
            assert len(cancelled) == 5
            assert_at_rest(roles, faculty)


def test_closing_stops_every_teacher_even_if_one_can_not_be(folders: dict[str, str]):
    recipe = recipe_of(folders)
    roles = start_local(recipe, make_plan(recipe), Watch(recipe.checks, print))
    assert roles.rank.teachers is not None
    places = engines_of(roles.rank.teachers.loaded)

    def breaks() -> None:
        raise EngineError("no end")

    places["small"].close = breaks
    with pytest.raises(EngineError, match="no end"):
        roles.close()
    assert places["wide"].closed
    assert isinstance(roles.engine, TorchEngine)
    assert roles.engine.closed


def test_copies_of_the_student_take_its_weights_when_due_and_are_saved(tmp_path: Path):
    recipe = Recipe.model_validate(
        teachers_recipe(teachers={"self": {"student": {"every": 2}}}, distill={"signal": "full"})
    )
    due = []
    with started(recipe) as (roles, faculty):
        place, learner = engines_of(faculty.loaded)["self"], roles.rank.student.learner
        start = {name: p.detach().clone() for name, p in place.model.named_parameters()}
        for step in range(1, 7):
            with torch.no_grad():
                for p in learner.model.parameters():
                    p.add_(0.01)
            learner.version = step
            faculty.refresh(step)
            if place.version == step:
                due.append(step)
        weights = {name: p.detach().clone() for name, p in place.model.named_parameters()}
        faculty.save(tmp_path / "teachers")
        head = faculty.loaded.heads["self"].weight.clone()
    assert due == [3, 5]
    with started(recipe) as (roles, faculty):
        place = engines_of(faculty.loaded)["self"]
        assert all(torch.equal(p, start[name]) for name, p in place.model.named_parameters())
        faculty.load(tmp_path / "teachers")
        assert all(torch.equal(p, weights[name]) for name, p in place.model.named_parameters())
        assert torch.equal(faculty.loaded.heads["self"].weight, head)
        assert place.version == 5
        assert_at_rest(roles, faculty)
        assert faculty.spent()[1] == {"self": 0}, "taking up a checkpoint is no step's work"
