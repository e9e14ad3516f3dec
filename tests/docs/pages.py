"""The pages of the docs, cut into fenced blocks.

A block with `title="path"` shows a file of the repository, word for word. A yaml block with `on="recipe"`
shows keys that may be added to a recipe. A block with `file="name"` is a file of the user's beside it. A
block marked `text output` is what the command before it prints. Commands of a block marked `sh full` are not
shortened. `python -m pytest` names tests of the suite, which runs them.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("README.md")),
]
_FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the rest of its first line, its text, and the line it begins at."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    def __getattr__(self, option: str) -> str | None:
        """Return `title`, `on` or `file` of the first line."""
        match = re.search(rf'{option}="([^"]+)"', self.info)
        return match[1] if match else None

    def __str__(self) -> str:
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A line that calls practicum or Python, and where it is written."""

    place: str
    line: str
    output: str | None = None
    full: bool = False

    @property
    def words(self) -> list[str]:
        """The arguments, without `practicum` in front."""
        return shlex.split(self.line, comments=True)[1:]

    @property
    def exit_code(self) -> int:
        """0, or what the comment after the command says."""
        match = re.search(r"# exit code (\d+)", self.line)
        return int(match[1]) if match else 0

    def __str__(self) -> str:
        return f"{self.place}: {self.line}"


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or those of one language."""
    text = page.read_text()
    blocks = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(page, line, match[1], match[2].strip(), match[3]))
    return [block for block in blocks if language in (None, block.language)]


def all_blocks(language: str | None = None) -> list[Block]:
    """The blocks of one language, or all, on all pages."""
    return [block for page in PAGES for block in blocks_of(page, language)]


def commands_of(page: Path) -> list[Command]:
    """Return the calls of practicum and Python on a page, in order."""
    commands = []
    blocks = blocks_of(page)
    for i, block in enumerate(blocks):
        if block.language != "sh":
            continue
        lines = [
            line
            for line in block.text.replace("\\\n", " ").splitlines()
            if line.startswith(("practicum ", "python "))
        ]
        after = blocks[i + 1] if i + 1 < len(blocks) else None
        output = after.text if after is not None and after.info == "output" else None
        commands += [
            Command(str(block), line, output if number == len(lines) else None, block.info == "full")
            for number, line in enumerate(lines, start=1)
        ]
    return commands
