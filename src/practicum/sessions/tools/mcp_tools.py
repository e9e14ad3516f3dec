"""Tools of MCP servers: child processes that speak MCP on their standard input and output.

A server starts at the first call of one of its tools and ends with the toolbox. A process lists the tools
of a command once, from a server that ends afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, cast

from practicum.concurrency.event_loop import event_loop, run_async
from practicum.errors import EngineError, MissingExtraError, PracticumError, RecipeError
from practicum.recipe.schema.rollout_sections import McpSection
from practicum.sessions.tools.tool import OUTPUT_CHARS, Kind, Parameter, Tool, ToolError, cut
from practicum.user_code import error_line, shorten

if TYPE_CHECKING:
    import mcp
    from mcp.types import Tool as ListedTool

START_S = 60.0
"""Seconds a server may take to start and list its tools."""
_STOP_S = 10.0
_KINDS: set[Kind] = {"string", "integer", "number", "boolean", "array", "object"}
_listed: dict[tuple[str, ...], list[ListedTool]] = {}
"""The tools of servers by their commands."""


def mcp_tools(spec: McpSection, path: str) -> list[Tool]:
    """Return the tools of a server. Raise a RecipeError at `path` if it does not start or has none."""
    command = tuple(spec.mcp.command)
    if command not in _listed:
        if shutil.which(command[0]) is None:
            raise RecipeError(f"{path}.command", repr(command[0]), "a program that can be started")
        try:
            _listed[command] = run_async(
                _list(command), timeout=START_S, owner=f"listing the tools of {path}"
            )
        except MissingExtraError:
            raise
        except PracticumError as error:
            raise RecipeError(
                f"{path}.command", str(error), "an MCP server on standard input and output"
            ) from None
    if not _listed[command]:
        raise RecipeError(f"{path}.command", "a server without tools", "one that has some")
    server = _Server(command)
    return [_make_tool(listed, server, spec.timeout_s) for listed in _listed[command]]


def _make_tool(listed: ListedTool, server: _Server, timeout_s: float) -> Tool:
    schema = listed.input_schema
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    parameters = [
        Parameter(name, _kind(value), str(value.get("description", "")), name in required)
        for name, value in properties.items()
    ]

    async def run(arguments: dict[str, Any]) -> str:
        # Servers live on the process's event loop, whichever calls.
        call = server.call(listed.name, arguments, timeout_s)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, event_loop()))

    about = listed.description or listed.title or listed.name
    return Tool(listed.name, about, tuple(parameters), run, server.close, schema)


def _kind(schema: Mapping[str, Any]) -> Kind:
    """Return the one type of a JSON schema beside null, if it names one."""
    names = {str(form.get("type")) for form in schema.get("anyOf", [schema])} - {"null"}
    return cast(Kind, names.pop()) if len(names) == 1 and names <= _KINDS else "any"


async def _list(command: tuple[str, ...]) -> list[ListedTool]:
    tools, cursor = [], None
    async with _connect(command) as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if (cursor := page.next_cursor) is None:
                return tools


@asynccontextmanager
async def _connect(command: tuple[str, ...]) -> AsyncIterator[mcp.Client]:
    """Start a server. Raise an EngineError with its last output if it does not speak MCP."""
    try:
        from mcp import Client, MCPError, StdioServerParameters, stdio_client
    except ImportError:
        raise MissingExtraError("agent.tools: mcp", "mcp") from None
    # It ends with this process, too, however that ends.
    program, *arguments = [*(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []), *command]
    server = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        client, is_open = Client(stdio_client(server, log), read_timeout_seconds=START_S), False
        try:
            async with client:
                is_open = True
                yield client
        except (MCPError, OSError, ValueError, ExceptionGroup) as error:
            if is_open:
                raise
            log.seek(0)
            last = " ".join(log.read()[-2000:].split("\n")[-3:]).strip() or error_line(error)
            started = f"the MCP server {' '.join(command)} did not start"
            raise EngineError(f"{started}: {shorten(last, 300)}") from error


class _Server:
    """A running server of tools, and its successor if it dies. All of it runs on the process's event loop."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command, self._closed = command, False
        self._keeper: asyncio.Task[None] | None = None
        self._client: asyncio.Future[mcp.Client] | None = None

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return a call's text. Raise ToolError if the tool fails or is late, or the server has ended."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        client = await self._running()
        try:
            result = await client.call_tool(name, arguments, read_timeout_seconds=timeout_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise ToolError(f"{name} did not answer within {timeout_s:g} s") from None
            if error.code == CONNECTION_CLOSED:
                await self._stop(client)
                raise ToolError(f"the server of {name} ended before it answered") from None
            raise ToolError(cut(f"{name}: {error.message}", OUTPUT_CHARS)) from None
        except ValueError as error:  # a result that is not as the protocol or the tool's schema says
            raise ToolError(
                f"the result of {name} can't be read: {shorten(error_line(error), 200)}"
            ) from error
        text = cut(_text(result), OUTPUT_CHARS)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the server, from any thread but the event loop's. Later calls raise EngineError."""
        if not self._closed:
            self._closed = True
            run_async(self._stop(), timeout=_STOP_S, owner="ending an MCP server")

    async def _running(self) -> mcp.Client:
        if self._closed:
            raise EngineError(f"the MCP server {' '.join(self._command)} was closed before a call had ended")
        if self._keeper is None or self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._client), name="MCP server")
        # One task starts and ends a server; all calls wait for it.
        await asyncio.wait({self._keeper, self._client}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            await self._stop()
            raise EngineError(f"the MCP server {' '.join(self._command)} did not start within {START_S:g} s")
        return await asyncio.shield(self._client)

    async def _keep(self, started: asyncio.Future[mcp.Client]) -> None:
        """Hold the server until this task is cancelled."""
        try:
            async with _connect(self._command) as client:
                started.set_result(client)
                await asyncio.get_running_loop().create_future()
        except EngineError as error:
            started.set_exception(error)

    async def _stop(self, ended: mcp.Client | None = None) -> None:
        """End the server, but only that of the client which has `ended`, if given."""
        if ended is not None and (self._client is None or self._client.result() is not ended):
            return
        keeper, self._keeper, self._client = self._keeper, None, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})


def _text(result: Any) -> str:
    """Return what a result says: its texts, the kinds of other parts, or else its structure as JSON."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
