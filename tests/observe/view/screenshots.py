"""Makes the README's pictures from recorded runs: `python -m tests.observe.view.screenshots STUDENT AGENT`.

STUDENT is the demo's student, AGENT a run of recipes/agent/student.yaml.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from practicum.observe.records.read_record import Record

from .served import TOKEN, served

IMAGES = Path(__file__).parents[3] / "docs" / "images"
MOST_BYTES = 200_000


def main(student: Path, agent: Path) -> None:
    """Write docs/images/overview.png and docs/images/tokens.png."""
    IMAGES.mkdir(exist_ok=True)
    with served([student, agent]) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        names = [run.name for run in (student, agent)]
        ids = names if names[0] != names[1] else [f"{run.parent.name}~{run.name}" for run in (student, agent)]
        take(browser, address, f"#/{ids[0]}/overview", "light", "overview.png", ".answers .answer", 535)
        place = f"#/{ids[1]}/{most_turns(agent)}/tokens?colour=ratio"
        take(browser, address, place, "dark", "tokens.png", ".token.chosen", 660)
        browser.close()


def most_turns(run: Path) -> str:
    """The session with the most tool calls among the newest that were learnt from."""
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    record = Record(run)
    learnt = [row for row in rows if row["advantage"] and record.rows(row["step"])]
    best = max(learnt, key=lambda row: (row["tool_calls"], row["step"]))
    return f"step/{best['step']}/prompt/{best['group']}/session/{best['session']}"


def take(browser: Any, address: str, place: str, scheme: str, name: str, shown: str, height: int) -> None:
    """One picture of this height, when `shown` is on the page; a large file is an error."""
    page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
    page.goto(f"{address}?token={TOKEN}{place}")
    page.wait_for_selector(shown)
    page.wait_for_timeout(1500)
    path = IMAGES / name
    page.screenshot(path=path)
    page.close()
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    assert size < MOST_BYTES, f"{path} has {size} bytes"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
