"""With a lag, nobody waits for ever: whoever stops answering ends the run, with a name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import EngineError, PracticumError, TeacherError
from practicum.processes.host import running_hosts
from practicum.trainer.run import train_loaded
from tests.teachers.tiny_teachers import MAKE, save_teacher

from .recipes import TINY, tiny
from .test_async import REWARD

pytestmark = pytest.mark.long

STEPS = TINY["train"] | {"steps": 50}


def after_step(number: int, act: Callable[[], None]) -> Callable[[dict[str, Any]], None]:
    """Let something happen when so many steps are learnt, while later ones are sampled."""

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == number:
            act()

    return on_step


def send(name: str, number: signal.Signals) -> None:
    """Send a signal to the run's child process of this name."""
    os.kill(running_hosts()[name], number)


def no_child_stays() -> bool:
    until = time.monotonic() + 10
    while running_hosts() and time.monotonic() < until:
        time.sleep(0.05)
    return not running_hosts()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGSTOP, r"the torch engine.*(did not answer|took more than).* 5 s"),
        (signal.SIGKILL, r"the torch engine.*process \d+ ended \(by signal SIGKILL"),
    ],
    ids=["stopped", "killed"],
)
def test_an_engine_that_stops_answering_ends_the_run_with_its_name(
    tmp_path: Path, number: signal.Signals, told: str
):
    loaded = tiny(tmp_path, "rollout.lag=1", "eval.rows=2", "rollout.deadline_s=10", train=STEPS, **REWARD)
    strike = after_step(2, lambda: send("the torch engine", number))
    with pytest.raises(EngineError, match=told) as raised:
        train_loaded(loaded, tmp_path / "run", on_step=strike, quiet=True)
    assert "--resume continues from it" in raised.value.__notes__[-1]
    assert no_child_stays()


def test_a_teacher_that_stops_answering_ends_the_run_with_its_name(tmp_path: Path):
    teacher = {"model": save_teacher(tmp_path / "teacher", seed=1), "placement": "own", "deadline_s": 4}
    taught = {
        "model": {"random_init": MAKE},
        "distill": {"signal": "top_k", "top_k": 4},
        "teachers": {"t": teacher},
    }
    loaded = tiny(tmp_path, "rollout.lag=1", "eval.rows=2", train=STEPS, **taught, **REWARD)
    strike = after_step(2, lambda: send("teachers.t", signal.SIGSTOP))
    with pytest.raises(TeacherError, match=r"teacher t .*did not answer for prompt \d+.* within 4 s"):
        train_loaded(loaded, tmp_path / "run", on_step=strike, quiet=True)
    assert no_child_stays()


def test_sessions_that_never_end_fail_the_run_with_their_loop(tmp_path: Path):
    """Each session fails at its deadline; nothing is left to learn from."""
    hangs = {"agent": {"loop": "tests.trainer.loops:hangs_late", "deadline_s": 1}}
    loaded = tiny(tmp_path, "rollout.lag=1", "eval.rows=2", train=STEPS, **hangs, **REWARD)
    told = r"16 sessions failed, the first: agent loop .*hangs_late was not done after agent.deadline_s = 1 s"
    with pytest.raises(PracticumError, match=told):
        train_loaded(loaded, tmp_path / "run", quiet=True)
    assert no_child_stays()
