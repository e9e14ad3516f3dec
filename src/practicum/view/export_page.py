"""`practicum view --export`: the page with its data in one HTML file that opens from disk."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from practicum import __version__
from practicum.errors import PracticumError
from practicum.view.diff_pane import compare
from practicum.view.run_view import RunView
from practicum.view.web_app import STATIC, to_json

SESSIONS, STEPS = 2000, 200
"""Of each run, the newest recorded sessions and steps that are taken along at most."""
TOKENS_BYTES = 12_000_000
"""Bytes of single sessions and their tokens, of all runs, after which the older ones are left out."""
COMPARED = 4
"""Runs that are compared with each other at most."""
_PLAIN = "!*'()"
"""What browsers leave as it is in a part of an address, besides letters, digits and _.-~."""
_IMPORT = re.compile(r'(from |import |import\()"\./([\w./]+\.js)"')


def export_page(runs: Sequence[RunView], path: Path) -> str:
    """Write the file; the sentence says how large it is and what was left out."""
    if path.is_dir():
        raise PracticumError(f"--export {path}: is a folder, expected the name of a file, such as run.html")
    answers: dict[str, Any] = {"api/runs": [run.label() for run in runs]}
    left: list[str] = []
    room = TOKENS_BYTES
    for run in runs:
        room -= _add_run(run, answers, left, room)
    for first, second in permutations(runs[:COMPARED], 2):
        answers[f"api/diff?{urlencode({'a': first.id, 'b': second.id})}"] = compare(first, second)
    made = f"Exported by practicum {__version__} at {time.strftime('%Y-%m-%d %H:%M')}."
    note = " ".join([made, *left])
    try:
        path.write_text(page_text({"note": note, "answers": answers}), encoding="utf-8")
    except OSError as error:
        raise PracticumError(f"--export {path}: {error.strerror}") from None
    return f"{path}: {path.stat().st_size / 1e6:.1f} MB. {note}"


def _add_run(run: RunView, answers: dict[str, Any], left: list[str], room: int) -> int:
    """Add all answers about a run; gives the bytes of its single sessions."""
    base = f"api/run/{quote(run.id, safe=_PLAIN)}"
    answers[base] = run.info()
    answers[f"{base}/series"] = run.series(run.metrics.names)
    for name in ("newest_group", "teachers", "recipe_page", "log", "forecast"):
        place = {"newest_group": "newest", "recipe_page": "recipe"}.get(name, name)
        answers[f"{base}/{place}"] = getattr(run, name)()
    steps = [step for step in run.metrics.steps if step > 0]
    for step in [0, *steps[-STEPS:]]:
        answers[f"{base}/step/{step}"] = run.step(step)
    if len(steps) > STEPS:
        left.append(f"{run.id}: the timelines of the first {len(steps) - STEPS} steps were left out.")
    used = 0
    for kind in ("samples", "eval"):
        used += _add_sessions(run, kind, base, answers, left, room - used)
    return used


def _add_sessions(
    run: RunView, kind: str, base: str, answers: dict[str, Any], left: list[str], room: int
) -> int:
    run.refresh(kind)
    table = run.sessions[kind]
    first = max(0, len(table) - SESSIONS)
    rows = table.after(first)
    answers[f"{base}/rows?kind={kind}"] = rows | {"from": 0, "total": len(table) - first, "generation": 0}
    texts = run.texts(kind, range(first, len(table)))
    place = f"{base}/texts" if kind == "samples" else f"{base}/texts?kind=eval"
    answers[place] = {row - first: text for row, text in texts.items()}
    used = whole = 0
    for row in reversed(range(first, len(table))):
        if used > room:
            break
        step, prompt, session = (table.columns[name][row] for name in ("step", "prompt", "session"))
        address = f"{base}/session/{step}/{prompt}/{session}?kind={kind}"
        found: dict[str, Any] = {address: run.session(kind, step, prompt, session)}
        if (group := f"{base}/group/{step}/{prompt}?kind={kind}") not in answers:
            found[group] = run.group(kind, step, prompt)
        for one in found[address]["trajectories"]:
            key = (prompt, session, one["trajectory"])
            found[f"{base}/tokens/{step}/{'/'.join(map(str, key))}"] = run.tokens(step, key)
        answers |= found
        used += len(to_json(found))
        whole += 1
    if whole < len(table):
        left.append(f"{run.id}: of {len(table):,} recorded sessions ({kind}) the newest {whole:,} are here.")
    return used


def page_text(data: Any) -> str:
    """index.html with all modules, styles and data inside, and a policy that lets nothing else in."""
    modules = {name: _module(name) for name in _modules()}
    styles = "\n".join(_read(name) for name in ("uplot/uPlot.min.css", "style.css"))
    imports = json.dumps({"imports": {f"practicum/{name}": url for name, url in modules.items()}})
    start = 'import "practicum/main.js";'
    policy = (
        f"default-src 'none'; script-src data: '{_hash(imports)}' '{_hash(start)}'; "
        f"style-src '{_hash(styles)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = to_json(data).replace("<", "\\u003c")
    icon = _data_url(_read("icon.svg"), "image/svg+xml")
    inside = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<link rel="icon" href="{icon}">',
        f"<style>{styles}</style>",
        f'<script type="application/json" id="exported-data">{text}</script>',
        f'<script type="importmap">{imports}</script>',
        f'<script type="module">{start}</script>',
    ]
    page = re.sub(r"<(link|script)\b[^>]*>(</script>)?\n", "", _read("index.html"))
    head, _, body = page.partition("</head>")
    return head + "\n".join(inside) + "\n</head>" + body


def _modules() -> list[str]:
    own = [file.name for file in STATIC.iterdir() if file.name.endswith(".js") and file.name != "early.js"]
    return [*sorted(own), "uplot/uPlot.esm.js"]


def _module(name: str) -> str:
    """A module as a data URL; it names others by their place in the import map."""
    return _data_url(_IMPORT.sub(r'\1"practicum/\2"', _read(name)), "text/javascript")


def _read(name: str) -> str:
    return STATIC.joinpath(*name.split("/")).read_text(encoding="utf-8")


def _data_url(text: str, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
