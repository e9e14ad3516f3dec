"""The viewer's server: who may ask, what can be asked, and its commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import PracticumError
from practicum.observe.view.run_view import RunView
from practicum.observe.view.serve_view import find_runs, listen, name_runs, view_beside
from practicum.observe.view.web_app import STATIC, news

from .served import TOKEN, sample, served, write_run

SOON_S = 20.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    metrics = [{"step": step, "reward/mean": step / 4, "time/step": 2.0} for step in range(1, 5)]
    samples = [sample(step, step, session) for step in (1, 2) for session in (0, 1)]
    return write_run(tmp_path_factory.mktemp("runs") / "small", metrics, samples)


@pytest.fixture(scope="module")
def address(run: Path):
    with served([run]) as url:
        yield url


def ask(url: str, token: str | None = TOKEN, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of an answer."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent["X-Practicum-Token"] = token
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=sent), timeout=30) as reply:
            return reply.status, reply.read().decode(), dict(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def test_a_page_that_begins_to_listen_looks_once_more(run: Path):
    """What was written after it asked and before it listened would be missed else."""

    async def heard() -> list[str]:
        return [text async for text in news([RunView(run, "small")], is_ending=lambda: True)]

    assert 'data: {"run": "small"}\n\n' in asyncio.run(heard())


def sentence(reply: tuple[int, Any, dict[str, str]]) -> tuple[int, str]:
    return reply[0], json.loads(reply[1])["error"]


def test_nothing_is_answered_without_the_token(address: str):
    for path in ("", "api/first", "static/main.js", "api/run/small/log", "api/events"):
        status, text = sentence(ask(address + path, token=None))
        assert status == 401, path
        assert "token is missing or wrong" in text
        assert sentence(ask(address + path, token="wrong"))[0] == 401


def test_the_token_of_the_address_becomes_a_cookie(address: str):
    status, page, headers = ask(f"{address}?token={TOKEN}", token=None)
    assert (status, "<title>practicum" in page) == (200, True)
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ask(address + "api/first", token=None, Cookie=cookie.partition(";")[0])[0] == 200


def test_other_names_and_other_origins_are_refused(address: str):
    port = address.rsplit(":", 1)[1].strip("/")
    assert sentence(ask(address + "api/first", Host=f"evil.example:{port}"))[0] == 403
    assert sentence(ask(address + "api/first", Origin="http://evil.example"))[0] == 403
    assert sentence(ask(address + "api/first", Origin="http://127.0.0.1:1"))[0] == 403
    assert ask(address + "api/first", Host=f"localhost:{port}")[0] == 200
    assert ask(address + "api/first", Origin=address.strip("/"))[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "static/../web_app.py",
        "static/%2e%2e/web_app.py",
        "static/..%2fweb_app.py",
        "static//etc/passwd.js",
        "static/uplot/LICENSE",
        "static/",
        "api/run/..%2f..%2fetc/log",
        "api/run/other/log",
        "api/run/small/samples.jsonl",
        "runs/small/versions.json",
    ],
)
def test_paths_outside_of_the_page_and_the_given_runs_are_refused(address: str, path: str):
    status, text = sentence(ask(address + path))
    assert status == 404
    assert "practicum view" in text


def test_the_page_may_load_nothing_from_elsewhere(address: str):
    policy = ask(address)[2]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("main.js", "style.css", "uplot/uPlot.esm.js"):
        status, text, headers = ask(f"{address}static/{name}")
        assert (status, headers["x-content-type-options"]) == (200, "nosniff")
    own = [file.name for file in STATIC.iterdir() if file.name.endswith((".js", ".css", ".html"))]
    for name in own:
        text = (STATIC / name).read_text(encoding="utf-8")
        assert "innerHTML" not in text, name
        assert text.count("import(") == text.count('import("./'), name
        assert "https://" not in text, name
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), name


def test_a_wheel_has_the_page_and_the_licence_of_its_charts():
    from hatchling.builders.wheel import WheelBuilder

    root = Path(__file__).parents[3]
    shipped = {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}
    folder = root / "src"
    static = folder / "practicum" / "observe" / "view" / "static"
    page = {str(file.relative_to(folder)) for file in static.rglob("*") if file.is_file()}
    assert len(page) > 20
    assert page <= shipped
    assert "MIT" in (STATIC / "uplot" / "LICENSE").read_text(encoding="utf-8")


def test_wrong_questions_get_a_sentence(address: str):
    assert sentence(ask(address + "api/run/small/series?name=a&first=x"))[0] == 400
    assert ask(address + "api/run/small/series?name=nothing")[0] == 200
    assert json.loads(ask(address + "api/run/small/group/9/9")[1]) == []
    assert sentence(ask(address + "api/diff?a=small&b=none"))[0] == 404
    told = json.loads(ask(address + "api/run/small/tokens/1/1/0/0")[1])
    assert "not in the record" in told["missing"]


def test_rows_are_sent_from_where_the_page_is(address: str):
    first = json.loads(ask(address + "api/run/small/rows?after=0")[1])
    later = json.loads(ask(address + "api/run/small/rows?after=3")[1])
    assert first["columns"]["session"] == [0, 1, 0, 1]
    assert (first["rows"], first["columns"]["turns"]) == (4, [1, 1, 1, 1])
    assert (later["from"], later["columns"]["session"]) == (3, [1])
    texts = json.loads(ask(address + "api/run/small/texts?row=3&row=77")[1])
    assert list(texts) == ["3"]
    assert texts["3"]["response"] == "1<eos>"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: None,
        lambda folder: folder.write_text("x"),
        lambda folder: folder.mkdir(),
        lambda folder: (write_run(folder.parent / "r"), folder.symlink_to("r/inner")),
    ],
    ids=["missing", "file", "empty", "dangling"],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, make: Any):
    make(tmp_path / "what")
    with pytest.raises(PracticumError, match="no run found in"):
        find_runs([tmp_path / "what"])


def test_runs_are_found_below_runs_and_named_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PracticumError, match="no run found in runs"):
        find_runs([])
    for name in ("a/student", "b/student", "c"):
        write_run(tmp_path / "runs" / name)
    assert sorted(run.id for run in find_runs([])) == ["a~student", "b~student", "c"]
    assert [run.id for run in name_runs([tmp_path / "runs/c", tmp_path / "runs/c"])] == ["c"]


def test_a_port_in_use_is_reported_and_the_usual_one_gives_way():
    with listen(0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(PracticumError, match=f"port {port} .* --port"):
            listen(port)
    with listen(None) as one, listen(None) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until(holds: Any) -> bool:
    until = time.monotonic() + SOON_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def test_the_page_beside_a_training_waits_for_the_run_and_ends_with_it(tmp_path: Path):
    with view_beside([tmp_path / "later"]) as url:
        port = int(url.split(":")[2].split("/")[0])
        token = url.partition("token=")[2]
        info = json.loads(ask(f"http://127.0.0.1:{port}/api/run/later", token)[1])
        assert info["state"]["kind"] == "waiting"
        write_run(tmp_path / "later", [{"step": 1, "a": 1.0}])
        assert json.loads(ask(f"http://127.0.0.1:{port}/api/run/later", token)[1])["step"] == 1
    assert not is_open(port)


def test_the_page_ends_when_the_training_is_killed(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from practicum.observe.view.serve_view import view_beside\n"
        "with view_beside([Path(sys.argv[1])]) as url: print(url, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    url = parent.stdout.readline()
    port = int(url.split(":")[2].split("/")[0])
    assert ask(url.strip(), token=None)[0] == 200
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=30)
    assert wait_until(lambda: not is_open(port))
