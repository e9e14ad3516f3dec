"""The Python tool: answers with what a program prints; every limit is really hit; nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from practicum.errors import EngineError
from practicum.recipe.schema.rollout_sections import Isolation
from practicum.sessions.tools.python_tool import Limits, PythonRunner, python_tool
from practicum.sessions.tools.sandbox import call_filter
from practicum.sessions.tools.tool import ToolError

from .processes import ISOLATIONS, needs_proc, sandboxes, wait_until

LINUX = sys.platform == "linux"
ROOMY = Limits(seconds=60, cpu_s=60)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch):
    """Each test's programs run below its own folder; afterwards no process and no file is there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("practicum-python-*")) == []
    if LINUX:
        wait_until(lambda: not sandboxes())


def run(program: str, limits: Limits = ROOMY) -> str:
    return asyncio.run(PythonRunner(limits, "process").run(program))


def failure(program: str, limits: Limits = ROOMY) -> str:
    with pytest.raises(ToolError) as caught:
        run(program, limits)
    return str(caught.value)


def test_it_answers_with_what_is_printed():
    tool = python_tool(timeout_s=60, isolation="process")
    assert asyncio.run(tool.call({"code": "for i in range(3):\n    print(i, 'é')"})) == "0 é\n1 é\n2 é"
    assert run("pass") == "(the program printed nothing)"


def test_programs_are_as_in_a_file_of_their_own():
    program = """
    from dataclasses import dataclass
    @dataclass
    class Point:
        x: "int" = 3
    def double(n): return 2 * n
    if __name__ == "__main__":
        print(double(Point().x), [double(i) for i in range(2)])
    """
    assert run("\n".join(line[4:] for line in program.splitlines())) == "6 [0, 2]"
    assert (
        run("import sys, __main__; print(sys.argv, hasattr(__main__, 'audit_hook'))") == "['<program>'] False"
    )


def test_usual_modules_work():
    modules = "math random json re collections itertools fractions decimal statistics datetime heapq asyncio"
    assert run(f"import {', '.join(modules.split())}\nprint('ok')") == "ok"
    assert run("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'slept')))") == "slept"


def test_an_error_is_the_last_line_of_its_traceback_after_what_was_printed():
    assert failure("print('a')\ndef f():\n    1/0\nf()") == "a\nZeroDivisionError: division by zero (line 3)"
    assert failure("x = (1,\n") == "SyntaxError: '(' was never closed (line 1)"
    assert failure("raise ValueError('two\\nlines')") == "ValueError: two lines (line 1)"
    assert failure("raise SystemExit('bye')") == "SystemExit: bye"
    assert failure("import sys; sys.exit(3)") == "the program ended with exit code 3."
    assert run("print(1); exit = __import__('sys').exit; exit(0)") == "1"


def test_an_error_that_can_not_be_told_is_named():
    assert failure("class E(Exception):\n    def __str__(self): raise self\nraise E") == "E (line 3)"
    assert len(failure("raise ValueError('x' * 100000)")) < 500


def test_there_is_no_input():
    assert "EOFError" in failure("input()")


def test_the_environment_and_packages_of_the_trainer_are_not_there(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert run("import os; print('SECRET_TOKEN' in os.environ)") == "False"
    assert "ModuleNotFoundError" in failure("import torch")


def test_the_same_program_prints_the_same():
    program = "print({'red', 'green', 'blue', 'black', 'white'})"
    assert len({run(program) for _ in range(3)}) == 1


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_that_takes_too_long_is_stopped(program: str):
    told = failure(f"print('on', flush=True)\n{program}", Limits(seconds=1.0))
    assert told == "on\nthe program took longer than 1 s and was stopped."


@pytest.mark.skipif(not LINUX, reason="needs the kernel's limit")
def test_cpu_time_is_limited_by_the_kernel_too():
    assert "took longer" in failure("while True: pass", Limits(seconds=60, cpu_s=1))


@pytest.mark.skipif(not LINUX, reason="needs the kernel's limit")
@pytest.mark.parametrize(
    "program", ["bytearray(1_000_000_000)", "x = []\nwhile True: x.append(bytearray(1_000_000))"]
)
def test_memory_is_limited(program: str):
    limits = Limits(seconds=60, cpu_s=60, memory_mb=64)
    assert failure(program, limits) == "the program needed more than 64 MB of memory."


def test_output_is_cut_with_a_note():
    limits = Limits(seconds=60, cpu_s=60, output_chars=20)
    assert (
        run("for i in range(1_000_000): print('a' * 100)", limits) == "a" * 20 + "… (cut after 20 characters)"
    )
    assert run("print('a' * 21)", limits) == "a" * 20 + "… (cut after 20 characters)"
    assert run("print('a' * 20)", limits) == "a" * 20
    assert run("print('\U0001f389' * 1000)", limits) == "\U0001f389" * 20 + "… (cut after 20 characters)"


def test_files_are_of_its_own_folder_and_small():
    assert run("open('a', 'w').write('hi'); print(open('a').read())") == "hi"
    assert run("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'four'))") == "4"
    assert "File too large" in failure("with open('a', 'wb') as f: f.write(b'x' * 100_000_000)")
    assert "allows 64 changes" in failure("for i in range(1000): open(str(i), 'w').close()")


@pytest.mark.parametrize(
    "program",
    [
        "print(open('/etc/passwd').read())",
        "import os; print(os.read(os.open('/etc/passwd', os.O_RDONLY), 10))",
        "import os; os.chdir('/'); print(open('etc/passwd').read())",
        "print(open(b'/etc/passwd').read())",
        "from pathlib import Path; print(Path('/etc/passwd').read_text())",
        "import os; print(os.listdir('/'))",
        "import os; print(list(os.scandir('..')))",
        "import os; os.symlink('/etc', 'etc')",
    ],
)
def test_reading_elsewhere_is_refused(program: str):
    assert "PermissionError: the sandbox does not allow" in failure(program)


def test_writing_elsewhere_is_refused(tmp_path: Path):
    there, mine = tmp_path / "there", tmp_path / "mine"
    mine.write_text("precious")
    for program in (
        f"open({str(there)!r}, 'w')",
        f"import os; os.mkdir({str(there)!r})",
        f"from pathlib import Path; Path({str(there)!r}).mkdir()",
        f"import os; os.remove({str(mine)!r})",
        f"import os; os.rename({str(mine)!r}, 'taken')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"open({str(mine)!r}, 'a').write('x')",
    ):
        assert "PermissionError: the sandbox does not allow" in failure(program)
    assert not there.exists()
    assert mine.read_text() == "precious"


def test_the_network_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "PermissionError" in failure(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        assert "PermissionError" in failure(f"import socket; socket.socket().connect(('127.0.0.1', {port}))")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(5): os.fork()",
        "import os; os.system('sleep 1000')",
        "import subprocess; subprocess.Popen(['sleep', '1000'])",
        "import os; os.execv('/bin/sh', ['sh', '-c', 'sleep 1000'])",
        "import multiprocessing as m\nif __name__ == '__main__': m.Process(target=print).start()",
        "import os; os.kill(os.getppid(), 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import ctypes",
    ],
)
def test_other_processes_are_out_of_reach(program: str):
    assert "the sandbox does not" in failure(program)


UNHOOKED = """
import errno, os, socket, threading
from practicum.sessions.tools import sandbox
sandbox.limit_calls(os.getppid())
kill, execute = lambda: os.kill(os.getppid(), 0), lambda: os.execv("/", ["/"])
fifo, priority = lambda: os.mkfifo("never"), lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)
processors = lambda: os.sched_setaffinity(os.getppid(), [0])
for attempt in (os.fork, socket.socket, os.setsid, kill, execute, fifo, priority, processors):
    try:
        attempt()
    except OSError as error:
        print(errno.errorcode[error.errno])
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(error)
print(os.path.exists("/"), len(socket.socketpair()))
"""


@pytest.mark.skipif(not LINUX, reason="needs the kernel's filter")
def test_the_kernel_refuses_what_would_get_past_the_hook():
    done = subprocess.run([sys.executable, "-c", UNHOOKED], capture_output=True, text=True, timeout=60)
    if not call_filter(os.uname().machine):
        pytest.skip("no filter for this machine")
    assert done.stdout.splitlines() == ["EPERM"] * 8 + ["can't start new thread", "True 2"]


def test_the_filter_knows_its_machines():
    assert call_filter("riscv64") == b""
    for machine in ("x86_64", "aarch64"):
        steps = call_filter(machine)
        assert len(steps) % 8 == 0
        assert steps[-4:] == (0x7FFF0000).to_bytes(4, sys.byteorder)


@needs_proc
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_cancelled_program_is_gone(isolation: Isolation):
    async def cancel() -> None:
        task = asyncio.create_task(PythonRunner(ROOMY, isolation).run("import time; time.sleep(1000)"))
        await asyncio.to_thread(wait_until, sandboxes)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wait_until(lambda: not sandboxes())


@needs_proc
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_call_may_be_cancelled_at_any_moment(isolation: Isolation):
    async def cancel() -> None:
        runner = PythonRunner(ROOMY, isolation, at_once=2)
        tasks = [asyncio.create_task(runner.run("import time; time.sleep(1000)")) for _ in range(4)]
        for turns, task in enumerate(tasks):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        assert await runner.run("print('free')") == "free"

    asyncio.run(cancel())
    wait_until(lambda: not sandboxes())


@needs_proc
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_closing_ends_what_runs_and_what_waits(isolation: Isolation):
    tool = python_tool(timeout_s=60, isolation=isolation)

    async def close() -> list[object]:
        calls = [tool.call({"code": "import time; time.sleep(1000)"}) for _ in range(20)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.to_thread(wait_until, sandboxes)
        tool.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(outcome) for outcome in asyncio.run(close())} == {EngineError}


TRAINER = """
import asyncio, sys
from practicum.sessions.tools.python_tool import Limits, PythonRunner
runner = PythonRunner(Limits(seconds=1000, cpu_s=1000), sys.argv[1])
asyncio.run(runner.run("import time; time.sleep(1000)"))
"""


@needs_proc
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_program_dies_with_the_trainer(isolation: Isolation, tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, isolation], env={**os.environ, "TMPDIR": str(tmp_path / "its")}
    ) as p:
        (tmp_path / "its").mkdir()
        try:
            # Bubblewrap is two processes besides.
            wait_until(lambda: len(sandboxes(p.pid)) == (3 if isolation == "bubblewrap" else 1))
        finally:
            p.send_signal(signal.SIGKILL)
    wait_until(lambda: not sandboxes(p.pid))


def test_fifty_programs_at_once_finish():
    async def many() -> list[str]:
        runner = PythonRunner(Limits(seconds=60, cpu_s=60), "process")
        return await asyncio.gather(*(runner.run(f"print({i} ** 2)") for i in range(50)))

    assert asyncio.run(many()) == [str(i**2) for i in range(50)]


@needs_proc
def test_no_more_programs_run_at_once_than_may():
    async def many() -> int:
        runner = PythonRunner(ROOMY, "process", at_once=3)
        tasks = [asyncio.create_task(runner.run("import time; time.sleep(0.05)")) for _ in range(9)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, len(sandboxes()))
            await asyncio.sleep(0.005)
        return most

    assert 1 <= asyncio.run(many()) <= 3


def test_it_runs_in_event_loops_of_any_thread():
    runner = PythonRunner(ROOMY, "process", at_once=1)

    async def several() -> list[str]:
        assert threading.current_thread() is not threading.main_thread()
        return await asyncio.gather(*(runner.run(f"print({i})") for i in range(4)))

    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):  # a loop each time: the runner belongs to none
            assert pool.submit(asyncio.run, several()).result(timeout=60) == ["0", "1", "2", "3"]


def test_an_interpreter_that_does_not_start_is_an_error_for_the_user(monkeypatch, tmp_path: Path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no libpython >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(EngineError, match="did not start: no libpython"):
        run("print(1)")
