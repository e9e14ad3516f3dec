"""The page in a real browser, on a real recorded run: all panes, from a curve to a token, live, hostile text.

Skipped where there is no Chromium; with PRACTICUM_REQUIRE_BROWSER=1 that is a failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.observe.records.read_record import Record
from practicum.recipe.load_recipe import load_recipe
from practicum.trainer.run import train_loaded
from practicum.trainer.run_folder import append_lines
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe

from .served import TOKEN, copy_run, live_start, served, write_run, write_versions

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
WAIT_MS = 30_000
PANES = ("overview", "metrics", "teachers", "rollouts", "step/last", "diff", "recipe", "log")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        sentence = "no Chromium: apt-get install chromium runs the tests of the page"
        if os.environ.get("PRACTICUM_REQUIRE_BROWSER"):
            pytest.fail(sentence)
        pytest.skip(sentence)
    with sync_api.sync_playwright() as playwright:
        # As root, as in containers, Chromium has no sandbox; the pages are ours.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def run(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a tiny student with two teachers and rewards."""
    root = tmp_path_factory.mktemp("view")
    teachers = {name: {"model": save_teacher(root / name, seed=seed)} for seed, name in enumerate("ab")}
    sections: dict[str, Any] = {
        "teachers": teachers,
        "route": {"by": "task", "map": {"copy": "a", "compare": "b"}},
        "distill": {"divergence": "forward_kl", "signal": "top_k", "top_k": 4},
        "reward": {"weight": 1.0},
        "rollout": {"samples": 4, "max_new_tokens": 6, "max_num_seqs": 16},
        "train": {"steps": 6, "prompts": 4, "lr": 1e-3},
        "eval": {"rows": 4, "every": 2},
        "expected": {"metric": "eval/greedy", "at_least": 0.5},
    }
    recipe = root / "school.yaml"
    recipe.write_text(yaml.safe_dump(teachers_recipe(**sections)))
    return train_loaded(load_recipe(recipe), root / "school", quiet=True).folder


@pytest.fixture(scope="module")
def other(run: Path) -> Path:
    """The same run under another name."""
    return copy_run(run, run.with_name("other"))


@pytest.fixture(scope="module")
def address(run: Path, other: Path) -> Iterator[str]:
    with served([run, other]) as url:
        yield url


def is_error(message: Any) -> bool:
    """A page may ask once more before it hears that its server has ended."""
    return message.type == "error" and "ERR_CONNECTION_REFUSED" not in message.text


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that may report no error; its width is a laptop's."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(WAIT_MS)
    made, errors = context.new_page(), []
    made.on("console", lambda m: errors.append(f"{m.text} {m.location['url']}") if is_error(m) else None)
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("dialog", lambda dialog: (errors.append("a dialog opened"), dialog.dismiss()))
    yield made
    context.close()
    assert errors == []


def visit(page: Any, address: str, place: str) -> None:
    """Go to a place of the page, and wait until it is shown."""
    if not page.url.startswith(address):
        page.goto(f"{address}?token={TOKEN}{place}")
    else:
        page.evaluate("place => { location.hash = place }", place)
    name = place.partition("?")[0].replace("#/", "")
    page.wait_for_function(
        "name => document.querySelector('main').dataset.shown?.includes(name)", arg=name, timeout=WAIT_MS
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(value: float) -> str:
    """A number as the page rounds it."""
    return f"{float(f'{value:.3g}'):g}".replace("-", "−")


@pytest.mark.slow
def test_every_pane_opens_in_both_themes_and_widths(page: Any, address: str):
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 844})
        for pane in PANES:
            visit(page, address, f"#/school/{pane}")
            assert len(page.inner_text("main")) > 40, pane
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{pane} is {wide} pixels wide at {width}"


@pytest.mark.slow
def test_numbers_of_the_page_are_those_of_the_files(page: Any, address: str, run: Path):
    last = lines(run / "metrics.jsonl")[-1]
    visit(page, address, "#/school/overview")
    assert "step 6/6" in page.inner_text("header")
    page.wait_for_selector(".chart canvas")
    legend = page.locator(".chart .legend").first.inner_text()
    assert shown(last["eval/greedy"]) in legend
    page.locator(".u-over").nth(1).hover()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.where')].filter(e => e.textContent).length === 4"
    )
    page.wait_for_selector("text=eval/greedy at least 0.5")
    visit(page, address, "#/school/step/6")
    told = dict(line.split("\n") for line in page.locator(".metric").all_inner_texts())
    assert told["train/grad_norm"] == shown(last["train/grad_norm"])
    assert len(told) == len(last) - 1
    exact = page.locator(".metric", has_text="train/grad_norm").locator("b").get_attribute("title")
    assert float(exact or "nan") == last["train/grad_norm"]
    visit(page, address, "#/school/teachers")
    table = page.locator("table").first.inner_text()
    assert f"{100 * last['teacher/a/gradient_share']:.0f} %" in table
    pane = page.inner_text("main")
    assert "Cosines of gradients" in pane
    assert f"momentum {100 * last['update/momentum']:.0f} %" in pane
    rows = lines(run / "samples.jsonl")
    visit(page, address, "#/school/rollouts")
    assert f"{len(rows)} of {len(rows)} recorded sessions" in page.inner_text(".tools")
    visit(page, address, "#/school/recipe?q=train.lr")
    assert page.locator(".recipe-table tbody tr").first.inner_text().split("\t")[1].strip() == "0.001"


@pytest.mark.slow
def test_three_clicks_lead_from_a_curve_to_its_tokens(page: Any, address: str, run: Path):
    visit(page, address, "#/school/metrics?q=reward/mean")
    plot = page.locator(".chart[data-name='reward/mean'] .u-over")
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.wait_for_selector(".wt-body .wt-row")
    step = int(re.findall(r"rollouts\?.*step=(\d+)", page.url)[0])
    assert "sort=reward" in page.url
    page.locator(".wt-body .wt-row").first.click()
    page.wait_for_selector(".turn.sampled")
    place = [int(number) for number in re.findall(r"step/(\d+)/prompt/(\d+)/session/(\d+)", page.url)[0]]
    assert place[0] == step
    answer = next(
        row for row in lines(run / "samples.jsonl") if [row["step"], row["group"], row["session"]] == place
    )
    assert answer["response"] in page.inner_text(".turn.sampled")
    page.click("text=tokens >> nth=0")
    page.wait_for_selector(".token.chosen")
    row = Record(run).row(step, (place[1], place[2], 0))
    assert row is not None
    assert page.locator(".flow .token:not(.prompt)").count() == len(row.columns["response_ids"])
    table = page.locator(".token-side table").first
    told = {
        cells[0]: cells[1] for cells in (t.split("\t") for t in table.inner_text().split("\n") if "\t" in t)
    }
    place_of_token = int(re.findall(r"place (\d+)", page.inner_text(".token-side"))[0]) - 1
    value = row.columns["teacher_logprobs"][place_of_token]
    title = table.locator("tr", has_text="logprob, teacher").locator("td.n").get_attribute("title")
    assert float(title) == value
    assert "advantage" in told
    teacher = page.locator(".top-k").first.inner_text()
    best = max(row.columns["teacher_topk_logprobs"][place_of_token])
    assert f"{100 * 2.718281828459045**best:.1f} %" in teacher
    page.go_back()
    page.wait_for_selector(".turn.sampled")


@pytest.mark.slow
def test_curves_are_searched_smoothed_zoomed_and_compared(page: Any, address: str):
    visit(page, address, "#/school/metrics?with=other&log=1&smooth=0.6")
    page.wait_for_selector(".small-charts canvas")
    page.fill("input[type=search]", "train gap")
    page.wait_for_function("() => document.querySelectorAll('.small-charts .chart').length === 4")
    assert "other" in page.locator(".small-charts .legend").first.inner_text()
    assert "q=train+gap" in page.url
    page.fill("input[type=search]", "no such metric")
    page.wait_for_selector("text=No metric has these words")
    visit(page, address, "#/school/metrics?q=reward/mean")
    plot = page.locator(".chart[data-name='reward/mean'] .u-over")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40, steps=3)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('range=')")
    first, last = map(int, re.findall(r"range=(\d+)-(\d+)", page.url)[0])
    assert 0 <= first < last <= 6
    page.click("text=all steps")
    page.wait_for_function("() => !location.hash.includes('range=')")


@pytest.mark.slow
def test_filters_bins_keys_and_links_change_the_place(page: Any, address: str, run: Path):
    rows = lines(run / "samples.jsonl")
    visit(page, address, "#/school/rollouts")
    page.select_option("select[aria-label=domain]", "copy")
    page.wait_for_function("() => location.hash.includes('domain=copy')")
    copies = sum(row["domain"] == "copy" for row in rows)
    page.wait_for_selector(f"text={copies} of {len(rows)} recorded sessions")
    for sort, best in (("-reward", max), ("reward", min)):
        visit(page, address, f"#/school/rollouts?domain=copy&sort={sort}")
        extreme = best(row["reward"] for row in rows if row["domain"] == "copy")
        assert shown(extreme) in page.locator(".wt-body .wt-row").first.inner_text().split("\n")
    prompt = next(row["prompt"] for row in rows if row["domain"] == "copy")
    page.fill("input[type=search]", prompt)
    same = sum(row["domain"] == "copy" and prompt in row["prompt"] for row in rows)
    page.wait_for_selector(f"text={same} of {len(rows)} recorded sessions")
    page.fill("input[type=search]", "")
    page.wait_for_selector(f"text={copies} of {len(rows)} recorded sessions")
    page.locator(".histogram").first.locator(".bin").first.click()
    page.wait_for_function("() => location.hash.includes('reward=')")
    lowest = min(row["reward"] for row in rows if row["domain"] == "copy")
    page.wait_for_function(
        "most => parseInt(document.querySelector('.tools .muted').textContent) <= most", arg=copies
    )
    kept = int(page.inner_text(".tools .muted").split()[0])
    assert 0 < kept <= copies
    assert shown(lowest) in page.inner_text(".tools .chip")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.sampled")
    page.keyboard.press("Escape")
    page.wait_for_selector(".answers.side")
    assert page.locator(".answers.side .answer").count() == 4
    for key, pane in (("m", "metrics"), ("t", "teachers"), ("o", "overview")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_function("pane => location.hash.includes(pane)", arg=pane)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.click("text=◐")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.slow
def test_a_run_grows_on_the_page_without_a_reload(page: Any, run: Path, tmp_path: Path):
    live = copy_run(run, tmp_path / "live")
    metrics = (live / "metrics.jsonl").read_text().splitlines(keepends=True)
    samples = (live / "samples.jsonl").read_text().splitlines(keepends=True)
    (live / "metrics.jsonl").write_text("".join(metrics[:4]))
    (live / "samples.jsonl").write_text("".join(samples[:8]))
    write_versions(live, live_start())
    with served([live]) as address:
        visit(page, address, "#/live/rollouts")
        page.wait_for_selector("text=step 3/6")
        assert "live" in page.inner_text(".state")
        page.evaluate("window.kept = 'the same page'")
        with (live / "samples.jsonl").open("a") as file:
            file.write("".join(samples[8:]))
        page.wait_for_selector(f"text={len(samples)} of {len(samples)} recorded sessions")
        visit(page, address, "#/live/overview")
        for line in metrics[4:]:
            append_lines(live / "metrics.jsonl", [json.loads(line)])
        page.wait_for_selector("text=step 6/6")
        write_versions(live, {"outcome": "stopped by RewardError: it <b>broke</b>", "last_step": 6})
        page.wait_for_selector(".notice.died")
        assert "it <b>broke</b>" in page.inner_text(".notice.died")
        assert page.evaluate("window.kept") == "the same page"


@pytest.mark.slow
def test_text_of_models_tools_and_recipes_is_never_html(page: Any, run: Path, tmp_path: Path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    hostile = copy_run(run, tmp_path / "hostile<b>")
    recipe = yaml.safe_load((hostile / "recipe.yaml").read_text())
    recipe |= {"name": f"name {evil}", "expected": {"metric": evil, "at_least": 0.5}}
    (hostile / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    rows = lines(hostile / "samples.jsonl")
    spans = [{"sampled": True, "text": f"<tool_call>{evil}", "tokens": 3}]
    spans += [{"sampled": False, "text": f"<tool>{evil}", "tokens": 3}]
    for row in rows:
        row |= {"response": evil, "prompt": evil, "expected": evil, "failure": evil, "domain": evil}
        row["trajectories"] = [{"prompt": evil, "spans": spans, "finish": "stop"}]
    (hostile / "samples.jsonl").write_text("")
    append_lines(hostile / "samples.jsonl", rows)
    (hostile / "log.txt").write_text(f"2026-01-01 00:00:00 warning: {evil}\n")
    last = rows[-1]
    group = f"step/{last['step']}/prompt/{last['group']}"
    session = f"{group}/session/{last['session']}"
    places = ["overview", "rollouts", "log", "recipe", group, session, f"{session}/tokens"]
    with served([hostile]) as address:
        for place in places:
            visit(page, address, f"#/hostile%3Cb%3E/{place}")
            if not place.endswith("tokens"):
                page.wait_for_function(
                    "text => document.body.innerText.includes(text)", arg="<script>alert(1)"
                )
            assert page.locator("main script, main img").count() == 0


@pytest.mark.slow
def test_empty_and_broken_states_say_what_to_do(page: Any, tmp_path: Path):
    recipe = {"model": {"path": "m"}, "tasks": {"sort": {"kind": "sort"}}, "track": {"record": "none"}}
    bare = write_run(tmp_path / "bare", [{"step": 1, "train/loss": float("nan")}], recipe=recipe)
    dead = write_run(
        tmp_path / "dead", start={"outcome": "stopped by RewardError: no such key", "last_step": 0}
    )
    with served([bare, dead, tmp_path / "later"]) as address:
        visit(page, address, "#/bare/rollouts")
        assert "track.record is none" in page.inner_text("main")
        visit(page, address, "#/bare/overview")
        assert "train/loss is not finite" in page.inner_text(".advisory.alarm")
        visit(page, address, "#/bare/teachers")
        assert "has no teachers" in page.inner_text("main")
        visit(page, address, "#/dead/overview")
        assert "no such key" in page.inner_text(".notice.died")
        visit(page, address, "#/later/overview")
        assert "has not started yet" in page.inner_text("main")
        page.evaluate("() => { location.hash = '#/nobody/overview' }")
        page.wait_for_selector("text=No run “nobody” is open here")
    page.wait_for_selector("text=practicum view has ended")
