"""Figures of the docs, drawn from stored results: `python -m tests.docs.figures` writes docs/images/*.svg."""

from __future__ import annotations

import io
import json
import re
from html import escape

from benchmarks.demo_seeds import STORED
from rich.console import Console

from practicum.commands.demo import BASE, PURPOSES, SAMPLED, SPECIALIST, STUDENT, WAY, Rows
from practicum.observe.text import score_table

from .pages import ROOT

IMAGES = ROOT / "docs/images"
_COLOURS = {"base": "#8a8f98", "specialist": "#c98a2b", "student": "#1b7f5c"}
_STYLE = """<style>
  svg { background: white }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 11px; fill: #57606a }
  .inside { font-size: 11px; fill: white }
  .box { fill: #f6f8fa; stroke: #57606a }
  .store { fill: #e7f3ee; stroke: #1b7f5c }
  .keys { fill: #fdf3e1; stroke: #c98a2b }
  .data { stroke: #1b7f5c; stroke-width: 2; fill: none; marker-end: url(#data) }
  .meta { stroke: #c98a2b; stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; marker-end: url(#meta) }
</style>"""


def data_flow() -> str:
    """Return the way of a step's tensors between workers, and of keys and tags to the controller."""
    parts = [_box(290, 20, 260, 50, "keys", "controller", "keys and tags of rows, no tensors")]
    parts.append(
        _box(
            30,
            250,
            780,
            44,
            "store",
            "store",
            "key → fields; a worker fetches only the fields that its stage reads",
        )
    )
    stages = (
        ("rollout", "engine samples"),
        ("reward", "functions, models"),
        ("teachers", "score every token"),
        ("advantages", "sessions compared"),
        ("update", "learner ranks"),
    )
    for number, (name, about) in enumerate(stages):
        x = 30 + number * 160
        parts.append(_box(x, 140, 140, 54, "box", name, about))
        if number:
            parts.append(f'<path class="data" d="M{x + 45},250 V200"/>')
        if name != "update":
            parts.append(f'<path class="data" d="M{x + 95},194 V244"/>')
        parts.append(f'<path class="meta" d="M{330 + number * 45},70 L{x + 70},134"/>')
    parts.append('<path class="data" d="M740,140 C740,100 600,96 420,112 S110,100 100,134"/>')
    parts.append('<text class="small" x="590" y="92">new weights</text>')
    parts.append('<path class="data" d="M30,326 H90"/><text class="small" x="98" y="330">tensors</text>')
    parts.append(
        '<path class="meta" d="M190,326 H250"/><text class="small" x="258" y="330">keys, tags, metrics</text>'
    )
    arrows = _arrow("data", "#1b7f5c") + _arrow("meta", "#c98a2b")
    return _svg(840, 345, f"<defs>{arrows}</defs>" + "".join(parts))


def _arrow(name: str, colour: str) -> str:
    box = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    return f'<marker id="{name}" {box}><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'


def _box(x: int, y: int, width: int, height: int, kind: str, title: str, about: str) -> str:
    middle, line = x + width / 2, y + height / 2
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        + _text(middle, line - 4, title, "")
        + _text(middle, line + 13, about, "small")
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{escape(text)}</text>'


def demo_scores(rows: Rows) -> str:
    """Return the demo's scores as bars, with lines for greedy scores."""
    title = "share of held-out prompts answered right: sampled (bar) and greedy (line)"
    parts = [f'<text x="60" y="26">{title}</text>']
    parts.append('<path d="M60,50 V230 H540" stroke="#57606a" fill="none"/>')
    domains = [name for name in rows[BASE] if f"specialist {name}" in rows]
    for number, domain in enumerate(domains):
        models = {"base": BASE, "specialist": f"specialist {domain}", "student": STUDENT}
        for place, (name, model) in enumerate(models.items()):
            score, x = rows[f"{model}{SAMPLED}"][domain], 75 + number * 155 + place * 40
            top = 230 - 180 * rows[model][domain]
            parts.append(f'<path d="M{x},{top:.0f} h36" stroke="{_COLOURS[name]}" stroke-width="2"/>')
            size = f'y="{230 - 180 * score:.0f}" width="36" height="{180 * score:.0f}"'
            parts.append(f'<rect x="{x}" {size} fill="{_COLOURS[name]}"/>')
            parts.append(_text(x + 18, 244 - 180 * score, f"{score:.2f}", "inside"))
        parts.append(_text(133 + number * 155, 250, domain, ""))
    labels = ("base model", "specialist of the domain", "student")
    for number, (label, colour) in enumerate(zip(labels, _COLOURS.values(), strict=True)):
        x = 75 + number * 165
        parts.append(f'<rect x="{x}" y="268" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text class="small" x="{x + 18}" y="278">{label}</text>')
    return _svg(560, 295, "".join(parts))


def demo_terminal(rows: Rows) -> str:
    """Return the demo as it appears in a terminal, without the progress of its runs."""
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True)
    console.print("$ practicum demo", highlight=False)
    names = [BASE, *(name for name in rows[BASE] if f"specialist {name}" in rows), STUDENT]
    for number, name in enumerate(names, start=1):
        console.print(f"[bold]{number}/{len(names)}[/bold] {name}: {PURPOSES.get(name, SPECIALIST)}")
    shown = {name: row for name, row in rows.items() if name != WAY}
    console.print(
        score_table(
            "share of held-out prompts answered right: greedily, and sampled", shown, list(rows[BASE])
        )
    )
    svg = console.export_svg(title="practicum demo", unique_id="demo")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no fonts from the network


def _svg(width: int, height: int, body: str) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{_STYLE}{body}</svg>\n'


def figures() -> dict[str, str]:
    """Return each figure by its file's name."""
    rows = json.loads(STORED.read_text())["seeds"]["1"]
    return {
        "data_flow.svg": data_flow(),
        "demo_scores.svg": demo_scores(rows),
        "demo_terminal.svg": demo_terminal(rows),
    }


if __name__ == "__main__":
    for name, svg in figures().items():
        (IMAGES / name).write_text(svg)
