"""A real MCP server on standard input and output: `python mcp_server.py [PID_FILE]`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")
if len(sys.argv) > 1:
    with Path(sys.argv[1]).open("a") as pids:
        pids.write(f"{os.getpid()}\n")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@server.tool()
def facts(of: list[str] | None = None) -> dict[str, int]:
    """Counts letters."""
    return {word: len(word) for word in of or []}


@server.tool()
async def nap(seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


server.run()
