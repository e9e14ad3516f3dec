"""The Python tool in bubblewrap, attacked from the inside; and what is said where it does not run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from practicum.errors import RecipeError
from practicum.recipe.schema.rollout_sections import Isolation, ToolSection
from practicum.sessions.tools import bubblewrap
from practicum.sessions.tools.python_tool import Limits, PythonRunner, _command, isolation_problem
from practicum.sessions.tools.tool import ToolError
from practicum.sessions.tools.toolbox import isolation_warnings, require_isolation

from .processes import needs_bubblewrap, sandboxes, wait_until

ROOMY = Limits(seconds=60, cpu_s=60, memory_mb=128)


def outcome(program: str, isolation: Isolation = "bubblewrap", limits: Limits = ROOMY) -> str:
    try:
        return asyncio.run(PythonRunner(limits, isolation).run(program))
    except ToolError as error:
        return f"failed: {error}"


def inside(attempts: dict[str, str], **names: object) -> dict[str, str]:
    """What each attempt gives in bubblewrap alone, without `sandbox`: a value or an error's name."""
    program = f"""
import json, os, socket
globals().update({names!r})
told = {{}}
for name, attempt in {attempts!r}.items():
    try:
        told[name] = repr(eval(attempt))
    except BaseException as error:
        told[name] = type(error).__name__
print(json.dumps(told))
"""
    command = bubblewrap.isolated([bubblewrap.python(), "-S", "-c", program], space_mb=8)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_bubblewrap
def test_a_practicum_that_is_installed_in_tmp_works_too():
    program = Path(tempfile.mkdtemp(dir="/tmp", prefix="installed-")) / "program.py"
    try:
        program.write_text("print(6 * 7)")
        shown = [bubblewrap.python(), "-S", str(program)]
        command = bubblewrap.isolated(shown, files=[str(program)], space_mb=8)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    finally:
        shutil.rmtree(program.parent)
    assert done.stdout == "42\n", done.stderr


@needs_bubblewrap
@pytest.mark.parametrize("which", [0, -1])
def test_a_process_that_is_killed_as_it_starts_fails_the_call_and_not_the_run(which: int):
    with ThreadPoolExecutor() as threads:
        told = threads.submit(outcome, "import time\ntime.sleep(60)")
        wait_until(sandboxes)
        os.kill(sorted(sandboxes())[which], signal.SIGKILL)
        assert told.result(60).startswith("failed: the program ")


@needs_bubblewrap
def test_files_of_the_machine_are_out_of_reach(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("the key")
    fd = "os.open('/', os.O_RDONLY)"
    read = {
        "secret": "open(secret).read()",
        "own": "open(mine).read()",
        "passwd": "open('/etc/passwd').read()",
        "relative": f"os.read(os.open(secret[1:], os.O_RDONLY, dir_fd={fd}), 9)",
        "after chdir": f"[os.mkdir('a'), os.chdir('a'), os.open(mine[1:], os.O_RDONLY, dir_fd={fd})]",
        "by a link": "[os.symlink(secret, '/tmp/link'), open('/tmp/link').read()]",
        "processes": "os.listdir('/proc')",
    }
    told = inside(read, secret=str(secret), mine=__file__)
    assert set(told.values()) == {"FileNotFoundError"}, told
    folders = ["/", "/root", "/home", "/tmp", "/dev", str(Path.home()), str(tmp_path), os.getcwd()]
    listed = inside({folder: f"os.listdir({folder!r})" for folder in folders})
    # The interpreter may be in the home: then the way to it is there.
    way = {"FileNotFoundError", "[]", *(repr([part]) for part in Path(bubblewrap.python()).parts)}
    assert {listed[folder] for folder in folders[1:4] + folders[5:]} <= way, listed
    assert set(eval(listed["/dev"])) == {"null", "zero", "random", "urandom"}


@needs_bubblewrap
def test_nothing_can_be_written_but_its_own_small_folder(tmp_path: Path):
    library = os.path.dirname(os.__file__)
    outside = ["/", "/dev", "/usr/lib", "/lib", "/root", library, str(tmp_path), str(Path.home())]
    attempts = {folder: f"open({folder + '/made'!r}, 'w')" for folder in outside}
    told = inside(
        {**attempts, "library": f"open({os.__file__!r}, 'r+')", "device": "os.mknod('d', 0o20600, 259)"}
    )
    assert set(told.values()) <= {"OSError", "FileNotFoundError", "PermissionError"}, told
    assert not (tmp_path / "made").exists()
    assert not Path(library, "made").exists()
    full = inside(
        {"fill": "open('f', 'wb').write(bytes(16 << 20))", "size": "os.stat('f').st_size <= 8 << 20"}
    )
    assert full == {"fill": "OSError", "size": "True"}
    assert not Path(bubblewrap.FOLDER, "f").exists()


@needs_bubblewrap
def test_the_network_and_the_processes_of_the_machine_are_not_there():
    me = os.getpid()
    before = os.getpriority(os.PRIO_PROCESS, me), os.sched_getaffinity(me)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0practicum-{me}")
        abstract.listen()
        told = inside(
            {
                "loopback": f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)",
                "abstract": f"socket.socket(socket.AF_UNIX).connect(chr(0) + 'practicum-{me}')",
                "interfaces": "[name for _, name in socket.if_nameindex()]",
                "signal": "os.kill(me, 0)",
                "group": "os.killpg(me, 0)",
                "priority": "os.setpriority(os.PRIO_PROCESS, me, 19)",
                "of the user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
                "processors": "os.sched_setaffinity(me, [0])",
                "limits": "__import__('resource').prlimit(me, 7)",
                "capabilities": "socket.sethostname('x')",
            },
            me=me,
        )
    assert told.pop("interfaces") == "['lo']"
    assert told.pop("of the user") == "None", "of its own processes alone"
    assert told.pop("capabilities") == "PermissionError"
    assert set(told.values()) == {"ConnectionRefusedError", "ProcessLookupError"}, told
    assert (os.getpriority(os.PRIO_PROCESS, me), os.sched_getaffinity(me)) == before


SAME = {
    "for i in range(3): print(i, 'é')": "0 é\n1 é\n2 é",
    "import math, random, json, decimal, datetime, asyncio, tempfile, sqlite3 as s\nprint('ok')": "sqlite3",
    "import sys; print(sys.argv, sys.stdin.read())": "['<program>'] ",
    "print('a'); 1/0": "failed: a\nZeroDivisionError: division by zero (line 1)",
    "import sys; sys.exit(3)": "failed: the program ended with exit code 3.",
    "import sys; sys.exit(137)": "failed: the program ended with exit code 137.",
    "import os; os.abort()": "failed: the program crashed (",
    "open('a', 'w').write('hi'); print(open('a').read())": "hi",
    "with open('a', 'wb') as f: f.write(b'x' * 100_000_000)": "File too large",
    "import os\nwhile True: os.fork()": "the sandbox does not",
    "import os; os.mkfifo('a')": "PermissionError",
    "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)": "PermissionError",
    "x = []\nwhile True: x.append(bytearray(1_000_000))": "needed more than 128 MB of memory.",
    "while True: print('no end')": "(cut after 2000 characters)",
}


@needs_bubblewrap
@pytest.mark.parametrize("program", SAME)
def test_a_program_answers_as_without_it(program: str):
    told = outcome(program)
    assert SAME[program] in told
    assert told == outcome(program, "process")


@needs_bubblewrap
def test_a_program_that_hangs_is_stopped():
    said = "failed: the program took longer than {:g} s and was stopped."
    assert outcome("import time; time.sleep(1000)", limits=Limits(seconds=0.5)) == said.format(0.5)
    assert outcome("while True: pass", limits=Limits(seconds=60, cpu_s=1)) == said.format(60), "CPU time"


@needs_bubblewrap
def test_nothing_outlives_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert outcome("open('kept', 'w').close()\nprint(open('kept').read() == '')") == "True"
    assert "FileNotFoundError" in outcome("open('kept')"), "each program has its own folder"
    wait_until(lambda: not sandboxes())
    assert list(tmp_path.iterdir()) == []


@needs_bubblewrap
def test_a_program_whose_trainer_died_while_it_was_started_does_not_run():
    reader, writer = os.pipe()
    os.close(reader)
    with tempfile.TemporaryFile() as source:
        source.write(b"\nimport time; time.sleep(1000)")
        source.seek(0)
        command = _command(ROOMY, "bubblewrap")
        done = subprocess.run(command, stdin=source, stdout=writer, timeout=60, start_new_session=True)
    os.close(writer)
    assert done.returncode == 1


@pytest.fixture
def fresh_trial():
    isolation_problem.cache_clear()
    yield
    isolation_problem.cache_clear()


def refusal(spec: ToolSection) -> str:
    with pytest.raises(RecipeError) as caught:
        require_isolation([ToolSection(use="calculator"), spec])
    return str(caught.value)


@pytest.mark.usefixtures("fresh_trial")
def test_where_it_is_missing_the_recipe_is_refused_with_both_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = refusal(ToolSection(use="python"))
    assert said.startswith(
        "agent.tools[1].isolation: found bubblewrap, which does not run here: it is not installed"
    )
    assert "apt-get install bubblewrap" in said
    assert "{use: python, isolation: process}" in said
    require_isolation([ToolSection(use="python", isolation="process")])


@pytest.mark.usefixtures("fresh_trial")
def test_where_the_kernel_refuses_it_its_words_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    refused = tmp_path / "bwrap"
    refused.write_text("#!/bin/sh\necho bwrap: setting up uid map: Permission denied >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said = refusal(ToolSection(use="python"))
    assert "allow user namespaces" in said
    assert "apt-get" not in said
    assert "does not run here: bwrap: setting up uid map: Permission denied" in said


def test_isolation_process_is_warned_about():
    assert isolation_warnings([ToolSection(use="calculator"), ToolSection(use="python")]) == []
    (said,) = isolation_warnings([ToolSection(use="python", isolation="process")])
    assert "read and write your files" in said
