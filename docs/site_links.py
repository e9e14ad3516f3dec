"""MkDocs hook: links that leave docs/ lead to the repository, or become plain text without one."""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

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

    return _LINK.sub(replace, markdown)
