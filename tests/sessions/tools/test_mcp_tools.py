"""Tools of a real MCP server: listed, called, late, failing, dying, and ended with the toolbox."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import EngineError, RecipeError
from practicum.recipe.schema.rollout_sections import McpSection
from practicum.sessions.tools.toolbox import Toolbox, ToolOutcome

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def spec(*command: str, timeout_s: float = 20.0) -> McpSection:
    return McpSection.model_validate({"mcp": {"command": list(command)}, "timeout_s": timeout_s})


def run(box: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[ToolOutcome]:
    """The outcomes of calls that run concurrently, on an event loop that is not the process's."""

    async def main() -> list[ToolOutcome]:
        return await asyncio.gather(*(box.run(name, arguments) for name, arguments in calls))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mcp") / "pids"


@pytest.fixture(scope="module")
def box(pids: Path) -> Iterator[Toolbox]:
    box = Toolbox([spec(sys.executable, SERVER, str(pids))])
    yield box
    box.close()


def is_running(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_servers_tools_are_shown_to_the_model_with_their_own_schemas(box: Toolbox):
    assert [tool.name for tool in box.tools] == ["add", "fail", "facts", "nap", "die"]
    function = box.schemas[0]["function"]
    assert function["description"] == "Adds two numbers."
    assert function["parameters"]["properties"]["b"]["default"] == 1
    assert function["parameters"]["required"] == ["a"]
    assert [p.kind for tool in box.tools[:3] for p in tool.parameters] == ["integer"] * 2 + [
        "string",
        "array",
    ]


def test_calls_are_answered_and_mistakes_are_text_for_the_model(box: Toolbox):
    calls: list[Any] = [
        ("add", {"a": 2, "b": 3}),
        ("add", {"a": "4"}),
        ("fail", {"reason": "no luck"}),
        ("add", {}),
    ]
    right, default, failed, missing = run(box, *calls)
    assert (right, default) == (ToolOutcome("5", True), ToolOutcome("5", True))
    assert not failed.ok
    assert "no luck" in failed.text
    assert not missing.ok
    (structured,) = run(box, ("facts", {"of": ["to", "see"]}))
    assert structured.ok
    assert '"see": 3' in structured.text


def test_a_server_that_dies_fails_its_call_and_is_started_again(box: Toolbox, pids: Path):
    (died,) = run(box, ("die", {}))
    assert not died.ok
    assert run(box, ("add", {"a": 1})) == [ToolOutcome("2", True)]
    *before, last = pids.read_text().split()
    assert is_running(last)
    assert not any(map(is_running, before))


def test_a_late_call_fails_alone_and_closing_ends_the_server(box: Toolbox, pids: Path):
    hasty = Toolbox([spec(sys.executable, SERVER, str(pids), timeout_s=1.0)])
    late, right = run(hasty, ("nap", {"seconds": 60}), ("add", {"a": 1}))
    assert not late.ok
    assert right == ToolOutcome("2", True)
    last = pids.read_text().split()[-1]
    assert is_running(last)
    hasty.close()
    assert not is_running(last)
    with pytest.raises(EngineError):
        run(hasty, ("add", {"a": 1}))


def test_what_is_no_server_is_refused(box: Toolbox, pids: Path, tmp_path: Path):
    (tmp_path / "empty.py").write_text("from mcp.server import MCPServer; MCPServer('empty').run()")
    commands = {
        "missing": ["no-such-program-here"],
        "ends": [sys.executable, "-c", "raise SystemExit('broken')"],
        "empty": [sys.executable, str(tmp_path / "empty.py")],
    }
    for command in commands.values():
        with pytest.raises(RecipeError) as caught:
            Toolbox([spec(*command)])
        assert caught.value.path == "agent.tools[0].mcp.command"
    with pytest.raises(RecipeError) as caught:
        Toolbox([spec(sys.executable, SERVER, str(pids))] * 2)
    assert caught.value.path == "agent.tools[1].mcp"
