"""The comparison of recipes/many_teachers: the page says what its records say."""

from __future__ import annotations

import importlib.util
import json
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

from practicum.recipe.shipped import shipped_recipes

HERE = shipped_recipes() / "many_teachers"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("many_teachers_report", HERE / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(row: str, seed: int, *points: tuple[float, float, float, float]) -> dict[str, Any]:
    """One of teacher tokens, seconds, and the scores of two domains."""
    found = [{"tokens": t, "seconds": s, "scores": {"a": a, "b": b}} for t, s, a, b in points]
    return {"set": "demo", "seed": seed, "row": row, "points": found}


RECORDS = [
    record("base", 1, (0, 0, 0.2, 0.4)),
    record("specialists", 1, (0, 0, 1.0, 0.9)),
    record("uniform merge", 1, (0, 0, 0.5, 0.5)),
    record("MOPD", 1, (0, 0, 0.2, 0.4), (100, 2, 0.6, 0.4), (200, 4, 0.8, 0.6)),
    record("SFT on right answers", 1, (0, 0, 0.2, 0.4), (60, 1, 0.4, 0.4), (120, 2, 0.6, 0.5)),
    record("GRPO", 1, (0, 0, 0.2, 0.4), (0, 1, 0.3, 0.4), (0, 9, 0.7, 0.7)),
]


def test_every_published_number_follows_from_the_records(report):
    records = [json.loads(line) for line in (HERE / "records.jsonl").read_text().splitlines()]
    page = (HERE / "README.md").read_text()
    shown = page.partition("<!-- results -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == report.report(records)


def test_the_sentences_about_another_tokenizer_follow_from_the_records():
    records = [json.loads(line) for line in (HERE / "records.jsonl").read_text().splitlines()]
    page = " ".join((HERE / "README.md").read_text().split())
    scores = {
        (record["row"], record["seed"]): [
            fmean(p["scores"].values()) for p in record["points"] if p["scores"]
        ]
        for record in records
        if record["set"] == "tokenizer"
    }

    def ways(row: str) -> list[float]:
        """By how much each seed ends higher than it began."""
        return [
            scores[f"other tokenizer, {row}", seed][-1] - scores[f"other tokenizer, {row}", seed][0]
            for seed in (1, 2, 3)
        ]

    one, two, three = ways("top 16 of shared tokens")
    assert f"end {one:.2f} higher, {-two:.2f} lower and {three:.2f} higher (seeds 1 to 3)" in page
    one, two, three = ways("mismatches included")
    assert f"(they end {one:.2f}, {two:.2f} and {three:.2f} higher)" in page
    ends = {
        row: [scores[f"other tokenizer, {row}", seed][-1] for seed in (1, 2, 3)]
        for row in ("top 16 of shared tokens", "mismatches left out", "mismatches included")
    }
    *others, included = ends.values()
    assert all(x > y for other in others for x, y in zip(included, other, strict=True)), (
        "better with every seed"
    )


def test_the_sentences_about_its_parts_follow_from_the_records():
    records = [json.loads(line) for line in (HERE / "records.jsonl").read_text().splitlines()]
    page = " ".join((HERE / "README.md").read_text().split())
    means: dict[str, list[str]] = {}
    for found in sorted(records, key=lambda found: found["seed"]):
        if found["set"] == "parts":
            later = [fmean(point["scores"].values()) for point in found["points"] if point["scores"]][1:]
            assert len(later) in (0, 8)
            means.setdefault(found["row"], []).extend([f"{fmean(later):.2f}"] if later else [])
    for row, before in (
        ("top 16 of shared tokens", "of seeds 1 to 3:"),
        ("joined tokens too", "are compared too,"),
        ("without end tokens", "that end an answer are not,"),
        ("joined tokens too, without end tokens", "with neither,"),
        ("sampled tokens, not shifted", "without the shift of `mismatched.py`,"),
    ):
        one, two, three = means[row]
        assert f"{before} {one}, {two} and {three}" in page, row


def test_a_row_counts_with_what_it_had_when_the_least_budget_was_spent(report):
    tokens, seconds = (report.scores_at(RECORDS, budget) for budget in ("tokens", "seconds"))
    assert tokens["MOPD"] == {1: pytest.approx(0.5)}  # of 120 tokens 100 were spent
    assert tokens["SFT on right answers"] == {1: pytest.approx(0.55)}
    assert tokens["uniform merge"] == {1: pytest.approx(0.5)}
    assert "GRPO" not in tokens, "it spends no teacher tokens"
    assert seconds["MOPD"] == {1: pytest.approx(0.5)}
    assert seconds["GRPO"] == {1: pytest.approx(0.35)}


def test_headroom_is_the_mean_way_from_the_base_to_each_specialist(report):
    assert report.headroom(RECORDS, "MOPD") == [pytest.approx((0.6 / 0.8 + 0.2 / 0.5) / 2)]


@pytest.mark.parametrize(
    ("apart", "least", "word"),
    [
        ((0.1, 0.2, 0.1), 0.0, "holds"),
        ((0.1, -0.2, 0.1), 0.0, "undecided"),
        ((-0.1, -0.2, -0.1), 0.0, "does not hold"),
        ((-0.01, -0.04, 0.1), -0.05, "holds"),
        ((0.0, 0.0, 0.0), 0.0, "undecided"),
    ],
)
def test_a_claim_holds_only_if_all_seeds_agree(report, apart, least, word):
    one, other = dict(enumerate(apart, 1)), dict.fromkeys((1, 2, 3), 0.0)
    assert report.verdict(one, other, least).startswith(f"{word}:")
    assert report.verdict(one, {}, least) == "–"
