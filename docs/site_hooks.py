"""MkDocs hooks: adapt a page of docs/ to the site.

Links that leave docs/ lead to the repository, or become plain text without one. A code block keeps the option
`title` of its first line alone; the others are for tests. A file of the reader has its name as title.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

_FENCE = re.compile(r"^```(\w+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if "://" in target or path.startswith("docs/"):
            return match[0]
        if not config.repo_url:
            return text
        kind = "tree" if os.path.isdir(path) else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{path}{anchor})"

    return _LINK.sub(replace, _FENCE.sub(_fence, markdown))


def _fence(match: re.Match[str]) -> str:
    name = re.search(r'(?:title|file|name)="([^"]+)"', match[2])
    return f"```{match[1]}" + (f' title="{name[1]}"' if name else "")
