"""The pages of the docs, cut into fenced blocks.

A block with `title="path"` is a file: the tests write it before they run the page's commands. A block marked
`text output` is what the last command of the block before it prints.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("README.md")),
]
_FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(PYTHONPATH=\. )?practicum ")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the rest of its first line, its text, and the line it begins at."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def title(self) -> str | None:
        """The file that the block is."""
        found = re.search(r'title="([^"]+)"', self.info)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a shell block that calls practicum."""

    block: Block
    line: str
    output: str | None

    @property
    def words(self) -> list[str]:
        """The arguments, without `practicum` in front."""
        words = shlex.split(self.line, comments=True)
        return words[words.index("practicum") + 1 :]

    @property
    def exit_code(self) -> int:
        """0, or what the comment behind the command says."""
        found = re.search(r"# exit code (\d+)", self.line)
        return int(found[1]) if found else 0

    @property
    def finds_modules_here(self) -> bool:
        """Whether modules of the working directory can be imported."""
        return self.line.startswith("PYTHONPATH=. ")

    def __str__(self) -> str:
        return f"{self.block}: {self.line}"


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, those of one language if asked."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[1], match[2].strip(), match[3]))
    return [block for block in found if language in (None, block.language)]


def all_blocks(language: str) -> list[Block]:
    """The blocks of one language on all pages."""
    return [block for page in PAGES for block in blocks_of(page, language)]


def commands_of(page: Path) -> list[Command]:
    """The calls of practicum on a page, in order."""
    commands = []
    blocks = blocks_of(page)
    for i, block in enumerate(blocks):
        if block.language != "sh":
            continue
        lines = [line for line in block.text.replace("\\\n", " ").splitlines() if _COMMAND.match(line)]
        after = blocks[i + 1] if i + 1 < len(blocks) else None
        output = after.text if after is not None and after.info == "output" else None
        commands += [
            Command(block, line, output if number == len(lines) else None)
            for number, line in enumerate(lines, start=1)
        ]
    return commands


def write_files(page: Path, folder: Path) -> None:
    """Write the page's titled blocks into a folder."""
    for block in blocks_of(page):
        if block.title is not None:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
