"""Hostile code and rows: what fails is named by function, prompt and session, and the rest continues."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from practicum.cli import app
from practicum.concurrency import event_loop as events
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.errors import DataError, DeadlineError, PracticumError, RecipeErrors, RewardError, TeacherError
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Reward, RewardFunction, Task
from practicum.recipe.schema.rollout_sections import ToolSection
from practicum.sessions.tools.toolbox import Toolbox, ToolOutcome
from practicum.tasks import prompts
from practicum.tasks.rewards import RewardFunctions, RewardSample
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.trainer import measure_prompts
from practicum.trainer.preflight import check_without_models
from practicum.trainer.run import train_loaded
from practicum.trainer.run_folder import RunFolder, choose_folder
from tests import hostile
from tests.cluster import local_ray
from tests.hostile import CASES, FAULTS, SESSIONS
from tests.trainer.recipes import TINY, tiny

ZOO_RUN: dict[str, Any] = {
    "agent": {"loop": "tests.hostile:zoo_loop", "tools": [{"use": "tests.hostile:tool"}]},
    "reward": {
        "functions": [{"use": "tests.hostile:zoo_reward"}, {"use": "tests.hostile:zoo_reward_async"}],
        "on_error": "skip",
    },
    "rollout": {"samples": SESSIONS, "max_new_tokens": 4, "slots": 64},
    "train": {"steps": 1, "prompts": 1, "lr": 1e-3},
    "eval": {"greedy": False},
    "track": {"record": 1000},
}
ON_RAY = {"kind": "ray", "threads": 1}
ONE_STEP = TINY["train"] | {"steps": 1, "prompts": 2}


def assert_named(run: Path) -> None:
    """Each session of the zoo failed with a line that names whose fault it is; the others have rewards."""
    answers = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [answer["session"] for answer in answers] == list(range(SESSIONS))
    log = (run / "log.txt").read_text()
    for answer, (where, what) in zip(answers, CASES, strict=False):
        failure = answer["failure"]
        assert failure is not None, (where, what)
        assert len(failure.splitlines()) == 1
        whose = {"reward": "reward zoo_reward ", "async reward": "reward zoo_reward_async "}
        assert failure.startswith(whose.get(where, "agent loop tests.hostile:zoo_loop ")), (where, what)
        assert where != "fault" or re.search(FAULTS[what][1], failure), failure
        assert f"failed: prompt 0/session {answer['session']}/trajectory 0: {failure}" in log
    assert [answer["reward"] for answer in answers[len(CASES) :]] == [2.0] * 4
    assert all(answer["tool_errors"] for answer in answers[len(CASES) :])


def test_nothing_of_the_zoo_ends_a_run(tmp_path: Path):
    train_loaded(tiny(tmp_path, **ZOO_RUN), tmp_path / "run")
    assert_named(tmp_path / "run")


VERDICTS: list[Any] = ["no number", "", "9" * 400, "-.", "\ud800", "<script>", "x" * 10**6]
"""What a judge may reply; none has a number that a reward can be."""


class _Judge(BaseHTTPRequestHandler):
    """Replies with the next of `VERDICTS` to each question, then with 5."""

    left: ClassVar[list[Any]] = []

    def _send(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send({"data": [{"id": "odd", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send({"choices": [{"text": self.left.pop(0) if self.left else "5"}]})

    def log_message(self, format: str, *args: Any) -> None: ...


def test_no_reply_of_a_judge_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model = {"kind": "judge", "model": "odd", "url": f"http://127.0.0.1:{server.server_port}/v1"}
    samples = len(VERDICTS) + 2
    recipe = tiny(
        tmp_path,
        reward={"functions": [], "models": {"rm": model}, "on_error": "skip"},
        rollout={"samples": samples, "max_new_tokens": 4, "slots": 64},
        train={"steps": 1, "prompts": 1, "lr": 1e-3},
        eval={"greedy": False},
        track={"record": 1000},
    )
    try:
        monkeypatch.setattr(_Judge, "left", ["5", *VERDICTS])  # the first one is the probe's
        train_loaded(recipe, tmp_path / "run")
        monkeypatch.setattr(_Judge, "left", ["5", {"7": 7}])
        with pytest.raises(TeacherError, match=r"reward model rm at .*prompt 0/.* is a dict, expected text"):
            train_loaded(recipe, tmp_path / "broken")
    finally:
        server.shutdown()
        server.server_close()
    answers = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    failures = [answer["failure"] for answer in answers if answer["failure"] is not None]
    assert len(answers) == samples
    assert len(failures) == len(VERDICTS)
    assert all(failure.startswith("reward model rm ") and len(failure) < 300 for failure in failures)
    assert [answer["reward"] for answer in answers if answer["failure"] is None] == [0.5] * 2


@pytest.mark.long
def test_nothing_of_the_zoo_ends_a_run_on_ray(tmp_path: Path):
    pytest.importorskip("ray")
    with local_ray():
        train_loaded(tiny(tmp_path, **ZOO_RUN, runtime=ON_RAY), tmp_path / "run")
        assert_named(tmp_path / "run")
        for name, sections, named in (
            ("loop", {"agent": {"loop": "tests.hostile:blocking_loop"}}, BLOCKED_LOOP),
            ("reward", {"reward": {"functions": [{"use": "tests.hostile:blocking_reward"}]}}, BLOCKED_REWARD),
        ):
            with pytest.raises(DeadlineError, match=named):
                train_loaded(tiny(tmp_path, **blocking(**sections), runtime=ON_RAY), tmp_path / name)


BLOCKED_LOOP = (
    r"rollout \(train\) was not done after 2 s: agent loop tests\.hostile:blocking_loop in prompt \d+/"
    r"session \d+ blocks the event loop\n(.*\n)*.*hostile\.py\", line \d+, in block\n"
)
BLOCKED_REWARD = (
    r"reward tests\.hostile:blocking_reward of prompt \d+/session \d+/trajectory \d blocks the event"
)


def blocking(**sections: Any) -> dict[str, Any]:
    """A recipe with two seconds for a rollout."""
    rollout = {"samples": 2, "max_new_tokens": 4, "deadline_s": 2}
    return {"rollout": rollout, "train": ONE_STEP, "eval": {"greedy": False}, **sections}


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What blocks the event loop is let go at the end."""
    monkeypatch.setattr(events, "_ANSWER_S", 0.5)
    hostile.RELEASED.clear()
    yield
    hostile.RELEASED.set()
    run_async(asyncio.sleep(0.1), timeout=60, owner="the end of what was blocked")


def test_a_loop_that_blocks_the_event_loop_is_named_at_the_deadline(tmp_path: Path, released: None):
    loaded = tiny(tmp_path, **blocking(agent={"loop": "tests.hostile:blocking_loop"}))
    with pytest.raises(DeadlineError, match=BLOCKED_LOOP):
        train_loaded(loaded, tmp_path / "run")


def test_a_reward_that_blocks_the_event_loop_is_named(released: None):
    task = Task(kind="copy", rewards=[RewardFunction(use="tests.hostile:blocking_reward")])
    sample = RewardSample("p", "r", "a", {}, "t", "t", "stop", "prompt 3/session 1/trajectory 0", 1)
    work = RewardFunctions({"t": task}, Reward()).score([sample])
    with pytest.raises(DeadlineError, match=rf"^test was not done after 0.5 s: {BLOCKED_REWARD}"):
        run_async(work, timeout=0.5, owner="test")


def test_a_tool_that_blocks_the_event_loop_is_named_and_work_that_never_began_is_closed(released: None):
    async def loop() -> list[ToolOutcome]:
        return await gather_all([box.run("blocking_tool", {"what": "x"})])

    box = Toolbox([ToolSection(use="tests.hostile:blocking_tool")])
    with pytest.raises(DeadlineError, match="tool blocking_tool, called by a test blocks the event loop"):
        run_async(loop(), timeout=0.5, owner="a test")
    never = loop()
    with pytest.raises(
        DeadlineError, match=r"another was not done after 0.1 s: tool blocking_tool, called by a"
    ):
        run_async(never, timeout=0.1, owner="another")
    assert inspect.getcoroutinestate(never) == inspect.CORO_CLOSED


def test_a_loop_may_raise_errors_of_practicum_that_nobody_can_write(tmp_path: Path):
    tiny(tmp_path, agent={"loop": "tests.hostile:raises_ours"}, train=ONE_STEP, eval={"greedy": False})
    path = str(tmp_path / "recipe.yaml")
    ran = CliRunner().invoke(app, ["train", path, "--out", str(tmp_path / "run")])
    assert ran.exit_code == 2, ran.exception
    assert "the engine said \\ud800" in ran.output
    assert "raised in agent loop tests.hostile:raises_ours in prompt 0/session" in ran.output


BROKEN = "half of a surrogate pair ('\\ud800' at character 3)"


def test_prompts_that_no_tokenizer_takes_are_named_before_a_run(tmp_path: Path):
    rows = ['{"prompt": "1+1", "answer": "2"}', '{"prompt": "1+\\ud800", "answer": "2"}']
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"prompt": "1+2", "answer": "3 \\udfff"}']))
    task = {"file": str(tmp_path / "rows.jsonl")}
    with pytest.raises(DataError) as caught:
        check_without_models(tiny(tmp_path, tasks={"t": task}).recipe)
    line, other = str(caught.value).splitlines()
    assert line.endswith(
        f"rows.jsonl, line 2: column 'prompt': the prompt has {BROKEN}, which no tokenizer takes"
    )
    assert "line 3: column 'answer': the answer has half of a surrogate pair" in other
    with pytest.raises(
        RecipeErrors, match=r"agent\.feedback: found '\\ud800', which has half of a surrogate"
    ):
        tiny(tmp_path, agent={"loop": "retry", "feedback": "\ud800"})


def test_a_prompt_of_a_task_of_ones_own_may_be_broken_in_the_second_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measure_prompts, "DRAWN", 2)
    tasks = {"t": {"kind": "tests.hostile:SOMETIMES_BROKEN"}}
    sections = {"tasks": tasks, "train": ONE_STEP | {"steps": 3}, "eval": {"greedy": False, "rows": 1}}
    loaded = next(
        loaded
        for seed in range(200)
        if breaks_in_step_2(loaded := tiny(tmp_path, f"seed={seed}", **sections))
    )
    with pytest.raises(
        DataError, match=r"tasks\.t\.kind: tests\.hostile:SOMETIMES_BROKEN made .*'\\ud800' at"
    ):
        train_loaded(loaded, tmp_path / "run")
    assert "stopped by DataError: tasks.t.kind" in (tmp_path / "run" / "log.txt").read_text()
    assert [row["step"] for row in RunFolder(tmp_path / "run").metrics()] == [0, 1]


def breaks_in_step_2(loaded: LoadedRecipe) -> bool:
    """Whether the prompts of the evaluation and of step 1 are good, and one of step 2 is not."""
    tasks, seed = loaded.recipe.tasks, loaded.recipe.seed
    stream = make_stream(tasks, seed)
    try:
        eval_prompts(tasks, 1, seed)
        stream.take(2)
    except DataError:
        return False
    try:
        stream.take(2)
    except DataError:
        return True
    return False


def test_a_long_prompt_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"prompt": "1" * (30 if i else 400), "answer": "1"} for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoded: list[int] = []
    check = prompts._check_text  # of each text that is to be encoded

    def counted(prompt: prompts.Prompt, *system: str) -> None:
        encoded.append(len(str(prompt.content)))
        check(prompt, *system)

    monkeypatch.setattr(prompts, "_check_text", counted)
    loaded = tiny(
        tmp_path,
        model={"make": TINY["model"]["make"] | {"context": 512}},
        tasks={"t": {"file": str(tmp_path / "rows.jsonl")}},
        teachers={"told": {"student": {"every": 20}, "before": "the answer is {answer}. "}},
        distill={"divergence": "reverse_kl", "signal": "full"},
    )
    check_without_models(loaded.recipe)
    assert sum(length >= 400 for length in encoded) == 2, (
        "once for the student, and once for the teacher, which reads more"
    )


@pytest.mark.parametrize("name", ["exits", "lies", "holds"])
def test_a_map_can_do_no_more_than_be_wrong(tmp_path: Path, name: str):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 4)
    task = {"file": str(tmp_path / "rows.jsonl"), "map": f"tests.hostile:map_that_{name}"}
    tiny(tmp_path, tasks={"t": task})
    ran = CliRunner().invoke(app, ["check", str(tmp_path / "recipe.yaml")])
    assert ran.exit_code == 2, ran.exception
    assert "rows.jsonl, line 1: tasks.t.map tests.hostile:map_that_" in ran.output.replace("\n", " ")
    said = {
        "exits": "raised SystemExit: 0",
        "lies": "RuntimeError: no class",
        "holds": "TypeError: cannot pickle",
    }
    assert said[name] in ran.output


def test_a_part_that_exits_is_named(tmp_path: Path, own_parts: None):
    tiny(tmp_path, "train.schedule=tests.hostile:exiting_schedule")
    with pytest.raises(
        PracticumError, match=r"train\.schedule: tests\.hostile:exiting_schedule raised SystemExit"
    ):
        train_loaded(tiny(tmp_path, "train.schedule=tests.hostile:exiting_schedule"), tmp_path / "run")


def killed_at(event: int, folder: Path, recipe: Any) -> bool:
    """Begin a run in another process that is killed at its event number `event`; whether it was."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def watch(name: str, args: Any) -> None:
            nonlocal seen
            writes = name == "open" and isinstance(args[1], str) and set(args[1]) & set("wax")
            if writes or name in ("os.mkdir", "os.rename", "os.rmdir"):
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        RunFolder(folder).replace(recipe)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_run_that_was_killed_as_it_began_is_known_by_its_first_file(tmp_path: Path):
    recipe = tiny(tmp_path).recipe
    event, used = 1, 0
    while killed_at(event, folder := tmp_path / f"run {event}", recipe):
        is_used = (folder / "versions.json").exists()
        used += is_used
        choose_folder(recipe, folder, resume=False, fresh=True)
        with pytest.raises(
            PracticumError, match="start again with --fresh" if is_used else "no run to resume"
        ):
            choose_folder(recipe, folder, resume=True, fresh=False)
        if is_used:
            with pytest.raises(PracticumError, match="holds a run already"):
                choose_folder(recipe, folder, resume=False, fresh=False)
        else:
            choose_folder(recipe, folder, resume=False, fresh=False)
        event += 1
    assert event > 4
    assert used >= 2


def test_fresh_that_is_killed_leaves_no_half_of_a_checkpoint(tmp_path: Path):
    recipe = tiny(tmp_path).recipe
    event = 1
    while True:
        folder = tmp_path / f"run {event}"
        RunFolder(folder).replace(recipe)
        for name in ("student", "critic"):
            (folder / "checkpoints" / "step-000001" / name).mkdir(parents=True)
        if not killed_at(event, folder, recipe):
            break
        held = list((folder / "checkpoints").glob("step-*/*"))
        assert len(held) in (0, 2)
        choose_folder(recipe, folder, resume=False, fresh=True)
        event += 1
    assert event > 4


def test_answers_domains_and_columns_may_be_no_text_that_can_be_written(tmp_path: Path):
    row = {"answer": "2 \ud800", "domain": "d\udfff", "other": "\ud83d"}
    rows = [{"prompt": f"{i}+1", **row} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "rows.jsonl")
    sections: dict[str, Any] = {
        "tasks": {"t": {"file": file, "eval_file": file}},
        "reward": {"functions": [{"use": "tests.trainer.rewards:at_random"}]},
        "track": {"tensorboard": True, "record": "all"},
    }
    train_loaded(tiny(tmp_path, train=ONE_STEP, **sections), tmp_path / "run")
    answer = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert (answer["expected"], answer["domain"]) == (row["answer"], "d\\udfff")


def test_a_reward_that_leaves_the_working_folder_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    reward = {"functions": [{"use": "tests.hostile:leaves"}]}
    loaded = tiny(tmp_path, "train.steps=2", "eval.every=1", "checkpoint.every=1", reward=reward)
    assert train_loaded(loaded, Path("run"), quiet=True).steps == 2
    assert Path.cwd() == tmp_path
    assert (tmp_path / "run/export/model.safetensors").exists()
    assert "has changed the working folder to a folder that is gone" in (tmp_path / "run/log.txt").read_text()


def metrics_and_weights(run: Path) -> tuple[list[dict[str, Any]], bytes]:
    """All but what has a clock's or the function's name."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    other = re.compile("time/|per_second|reward/part/")
    lasting = [{k: v for k, v in row.items() if not other.search(k)} for row in rows]
    return lasting, (run / "export/model.safetensors").read_bytes()


def test_a_reward_that_meddles_with_the_process_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: None
):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    streams, runs = (sys.stdout, sys.stderr), {}
    for name in ("lasting", "meddles"):
        reward = {"functions": [{"use": f"tests.hostile:{name}"}]}
        train_loaded(tiny(tmp_path, "train.steps=2", "eval.every=1", reward=reward), tmp_path / name)
        assert (sys.stdout, sys.stderr) == streams
        runs[name] = metrics_and_weights(tmp_path / name)
    assert runs["meddles"] == runs["lasting"]
    assert "has replaced sys.stdout: it is set back" in (tmp_path / "meddles/log.txt").read_text()


def test_a_reward_that_closes_stdout_ends_no_run(tmp_path: Path):
    tiny(tmp_path, "train.steps=2", reward={"functions": [{"use": "tests.hostile:closes_stdout"}]})
    command = [sys.executable, "-m", "practicum", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(
        [*command, "--set", "train.steps=2", "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "a reward, loop or tool has closed stdout" in (tmp_path / "run/log.txt").read_text()
    assert (tmp_path / "run/export/model.safetensors").exists()


@pytest.mark.parametrize("name", ["changes_dtype", "changes_dtype_async"])
def test_a_reward_that_changes_torchs_default_dtype_is_named(name: str):
    task = Task(kind="copy", rewards=[RewardFunction(use=f"tests.hostile:{name}")])
    sample = RewardSample("p", "r", "a", {}, "t", "t", "stop", "prompt 3/session 1/trajectory 0", 1)
    work = RewardFunctions({"t": task}, Reward()).score([sample])
    with pytest.raises(RewardError, match=f"hostile:{name} changed torch's default dtype to torch.float64"):
        run_async(work, timeout=60, owner="test")
    assert torch.get_default_dtype() is torch.float32


STUCK = """
import multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from practicum import cli
from practicum.commands import ending

def command(prog_name):
    {left}
    sys.exit(3)

ending.LEFT_S, cli.app = 1.0, command
cli.main()
"""


@pytest.mark.parametrize(
    ("left", "named"),
    [
        ("ThreadPoolExecutor(1).submit(time.sleep, 1000)", "thread ThreadPoolExecutor-0_0"),
        ("threading.Thread(target=time.sleep, args=(1000,), name='mine').start()", "thread mine"),
        ("multiprocessing.Process(target=time.sleep, args=(1000,), name='own').start()", "(own)"),
    ],
)
def test_what_users_code_left_running_does_not_keep_a_command_alive(tmp_path: Path, left: str, named: str):
    (tmp_path / "stuck.py").write_text(STUCK.format(left=left))
    command = [sys.executable, str(tmp_path / "stuck.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "left something running, which ends with it:" in done.stderr
    assert named in done.stderr
