"""Processes of tools: bounded, and no one of their group is left at the end, whatever the end is."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import EngineError
from practicum.processes.bounded_command import FinishedProcess, RunningProcess, kill_group, run_process

from .processes import group, needs_proc, wait_until

FAMILY = "sleep 1000 & sleep 1000 & echo started; wait"


def run_shell(script: str, folder: Path, seconds: float = 30.0, stdout_bytes: int = 100, **other: Any):
    return run_process(
        ["/bin/sh", "-c", script],
        folder=folder,
        environment={"PATH": "/usr/bin:/bin", "GIVEN": "yes"},
        seconds=seconds,
        stdout_bytes=stdout_bytes,
        running=other.get("running", RunningProcess()),
    )


def test_a_process_gets_its_folder_its_environment_and_no_input(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SECRET", "not to be seen")
    script = "pwd; echo $GIVEN $SECRET; cat; echo oops >&2; exit 3"
    finished = asyncio.run(run_shell(script, tmp_path))
    assert finished == FinishedProcess(f"{tmp_path}\nyes\n".encode(), b"oops\n", 3, cut=False, late=False)


def test_endless_output_is_cut_and_its_process_killed(tmp_path: Path):
    finished = asyncio.run(run_shell("yes", tmp_path, stdout_bytes=10))
    assert finished.stdout == b"y\ny\ny\ny\ny\n"
    assert finished.cut
    assert not finished.late


def test_the_end_of_endless_errors_is_kept(tmp_path: Path):
    finished = asyncio.run(run_shell("yes | head -c 1000000 >&2; echo last >&2", tmp_path))
    assert finished.stderr.endswith(b"y\nlast\n")
    assert len(finished.stderr) <= 4096


def test_a_command_that_does_not_exist_is_an_error_for_the_user(tmp_path: Path):
    running = RunningProcess()
    call = run_process(
        [str(tmp_path / "nothing")],
        folder=tmp_path,
        environment={},
        seconds=1,
        stdout_bytes=10,
        running=running,
    )
    with pytest.raises(EngineError, match=r"can't start .*nothing"):
        asyncio.run(call)
    assert not running.pids


@needs_proc
def test_a_late_process_goes_with_its_children(tmp_path: Path):
    async def late() -> tuple[int, FinishedProcess]:
        running = RunningProcess()
        task = asyncio.create_task(run_shell(FAMILY, tmp_path, seconds=1.0, running=running))
        await asyncio.to_thread(wait_until, lambda: running.pids and len(group(*running.pids)) == 3)
        (pid,) = running.pids
        return pid, await task

    pid, finished = asyncio.run(late())
    assert finished.late
    assert finished.stdout == b"started\n"
    wait_until(lambda: not group(pid))


@needs_proc
def test_a_cancelled_process_goes_with_its_children(tmp_path: Path):
    async def cancelled() -> int:
        running = RunningProcess()
        task = asyncio.create_task(run_shell(FAMILY, tmp_path, running=running))
        await asyncio.to_thread(wait_until, lambda: running.pids and len(group(*running.pids)) == 3)
        (pid,) = running.pids
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not running.pids
        return pid

    pid = asyncio.run(cancelled())
    wait_until(lambda: not group(pid))


@needs_proc
def test_children_that_outlive_their_process_are_killed(tmp_path: Path):
    async def left() -> tuple[int, FinishedProcess]:
        running = RunningProcess()
        script = "sleep 1000 >/dev/null 2>&1 & echo $$"
        finished = await run_shell(script, tmp_path, running=running)
        return int(finished.stdout), finished

    pid, finished = asyncio.run(left())
    assert finished.code == 0
    wait_until(lambda: not group(pid))


@needs_proc
def test_a_process_that_ended_while_the_loop_was_busy_was_not_late(tmp_path: Path):
    async def busy() -> FinishedProcess:
        running = RunningProcess()
        task = asyncio.create_task(run_shell("echo done; exit 4", tmp_path, seconds=0.2, running=running))
        while not running.pids:
            await asyncio.sleep(0)
        wait_until(lambda: not group(*running.pids))
        threading.Event().wait(0.3)  # past its time, and the loop does nothing meanwhile
        return await task

    finished = asyncio.run(busy())
    assert (finished.stdout, finished.code, finished.late) == (b"done\n", 4, False)


def test_killing_a_group_that_is_gone_does_nothing(tmp_path: Path):
    async def gone() -> int:
        return int((await run_shell("echo $$", tmp_path)).stdout)

    kill_group(asyncio.run(gone()))


def test_a_process_that_starts_after_closing_is_killed_at_once(tmp_path: Path):
    running = RunningProcess()
    running.close()
    finished = asyncio.run(run_shell("sleep 1000", tmp_path, running=running))
    assert finished.code < 0
    assert not finished.late
