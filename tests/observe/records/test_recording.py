"""What a run records: every stage's columns, the update's own numbers, the timeline; nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Ragged
from practicum.errors import PracticumError
from practicum.observe.records.read_record import Record, RecordedRow
from practicum.observe.records.record_files import RecordPlace
from practicum.observe.records.recorder import Recorder

from .runs import recorded_run

FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


def rows_of(run: Path, step: int) -> list[RecordedRow]:
    record = Record(run)
    found = [record.row(step, row.key) for row in record.rows(step)]
    assert not record.problems
    return [row for row in found if row is not None]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "shared/", "rollout/tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def written(run: Path) -> list[str]:
    """All lines of a record's rows: sessions end, and are written, in any order."""
    lines = [json.loads(line) for line in (run / "record" / "local-0.jsonl").read_text().splitlines()]
    return sorted(json.dumps(line | {"at": None}) for line in lines if "seconds" not in line)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def test_numbers_are_the_same_whatever_is_recorded(whole_run: Path, tmp_path: Path):
    for record in ("none", "1"):
        other = recorded_run(tmp_path / record, f"track.record={record}")
        assert metrics_of(other) == metrics_of(whole_run)
        pairs = zip(weights_of(other).values(), weights_of(whole_run).values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    assert not (tmp_path / "none" / "run" / "record").exists()
    keys = [row.key for row in Record(tmp_path / "1" / "run").rows(1)]
    assert keys == [(keys[0].prompt, session, 0) for session in range(4)]


def test_each_stage_adds_its_columns_to_each_row(whole_run: Path):
    for step in (1, 2):
        rows = rows_of(whole_run, step)
        assert len(rows) == 16
        for row in rows:
            assert list(row.stages) == ["rollout", "reward", "old_logprobs", "advantages", "update_student"]
            tokens, told = row.summary.tags.response_tokens, row.summary.tags
            assert all(
                len(column) == (told.prompt_tokens if name == "prompt_ids" else tokens)
                for name, column in row.columns.items()
                if column.ndim
            )
            assert (told.step, row.summary.trained, told.status) == (step, step, "ready")
            assert row.columns["reward"] == pytest.approx(told.reward)
            assert set(row.columns["version"]) == {2 * (step - 1)}


def test_the_update_records_what_its_loss_used(whole_run: Path):
    """Losses, clips and entropies of the rows are those of the metrics, ratios those of the logprobs."""
    for step, metrics in ((1, metrics_of(whole_run)[1]), (2, metrics_of(whole_run)[2])):
        rows = rows_of(whole_run, step)
        halves = [[row for row in rows if row.summary.update == number] for number in (1, 2)]
        sums = [sum(x for row in half for x in row.columns["loss"]) for half in halves]
        assert sum(sums) / 2 == pytest.approx(metrics["train/loss"], abs=1e-6)
        shares = [sum(x for row in half for x in row.columns["share"]) for half in halves]
        assert shares == pytest.approx([1, 1], abs=1e-4)
        means = [mean(half, "entropy") for half in halves]
        assert sum(means) / 2 == pytest.approx(metrics["train/entropy"], abs=1e-5)
        for rule, name in (("clip_low", "clipped_low"), ("clip_high", "clipped_high")):
            clipped = [share(half, rule) for half in halves]
            assert sum(clipped) / 2 == pytest.approx(metrics[f"train/{name}"], abs=1e-6)
        assert any(row.rules for row in halves[1]), "the second optimizer step is meant to clip"
        for row in rows:
            check_tokens(row)


def check_tokens(row: RecordedRow) -> None:
    columns = row.columns
    held = {place for places in row.rules.values() for place in places}
    logprobs = torch.tensor(columns["learner_logprobs"]), torch.tensor(columns["old_logprobs"])
    torch.testing.assert_close(torch.tensor(columns["ratio"]), (logprobs[0] - logprobs[1]).exp())
    for place, (ratio, weight) in enumerate(zip(columns["ratio"], columns["weight"], strict=True)):
        assert weight == (0 if place in held else ratio)
    for best, sampled, logprob in zip(
        columns["student_topk_logprobs"], columns["response_ids"], columns["learner_logprobs"], strict=True
    ):
        assert best.tolist() == sorted(best, reverse=True)
        assert logprob <= best[0] + 1e-6, sampled


def mean(rows: list[RecordedRow], name: str) -> float:
    values = [value for row in rows for value in row.columns[name]]
    return sum(values) / len(values)


def share(rows: list[RecordedRow], rule: str) -> float:
    held = sum(len(row.rules.get(rule, ())) for row in rows)
    return held / sum(row.summary.tags.sampled_tokens for row in rows)


def test_every_stage_of_a_step_is_on_the_timeline(whole_run: Path):
    spans = Record(whole_run).stages(2)
    here = {span.stage: span for span in spans if span.role == "local"}
    assert list(here) == ["rollout", "reward", "pad", "old_logprobs", "advantages", "update_student"]
    whole = {span.stage: span for span in spans if span.role == "controller"}
    assert whole.keys() == here.keys() | {"sync", "clear"}
    for stage in ("rollout", "old_logprobs", "update_student"):
        assert here[stage].seconds <= whole[stage].seconds
        assert whole[stage].began <= here[stage].began
    assert here["old_logprobs"].rows == len(Record(whole_run).rows(2))


def test_a_resumed_run_records_what_one_that_was_never_stopped_does(
    whole_run: Path, one_step: Path, tmp_path: Path
):
    run = shutil.copytree(one_step, tmp_path / "run")
    for name in ("local-0.jsonl", "local-0.bin"):
        with (run / "record" / name).open("a") as file:
            file.write('{"step": 2, "row": [4, 0, 0], "sta')
    (run / "record" / "rollout-3.jsonl").write_text('{"of a step": "that was killed"}\n')
    recorded_run(tmp_path, resume=True)
    assert written(run) == written(whole_run)
    for step in (1, 2):
        for one, two in zip(rows_of(run, step), rows_of(whole_run, step), strict=True):
            np.testing.assert_equal(one.columns, two.columns)
    assert (run / "record" / "rollout-3.jsonl").read_text() == ""


def test_a_record_that_cannot_be_written_ends_the_run_with_a_sentence(one_step: Path, tmp_path: Path):
    full = shutil.copytree(one_step, tmp_path / "run") / "record"
    for path in full.iterdir():
        path.unlink()
    (full / "local-0.jsonl").symlink_to("/dev/full")
    with pytest.raises(PracticumError, match=r"local-0.jsonl can't be written: No space left") as failed:
        recorded_run(tmp_path, resume=True)
    assert "has a checkpoint of step 1: --resume continues from it" in "".join(failed.value.__notes__)


@given(st.lists(st.lists(FLOAT32, min_size=3, max_size=3), max_size=4))
def test_floats_come_back_to_the_bit(values: list[list[float]]):
    tensor = torch.tensor(values).reshape(-1, 3)
    batch = BatchRef("train", (Key(0),), (Tags(step=1, recorded=True),))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "versions.json").write_text('{"practicum": "1"}')
        recorder = Recorder(RecordPlace(Path(folder) / "record", "local"))
        recorder.add("rollout", batch, {"x": Ragged.from_rows([tensor])})
        row = Record(Path(folder)).row(1, (0, 0, 0))
    assert row is not None
    assert row.columns["x"].tobytes() == tensor.numpy().tobytes()


def test_a_record_is_read_up_to_its_last_whole_line_and_followed(whole_run: Path, tmp_path: Path):
    shutil.copytree(whole_run, tmp_path / "run")
    path = tmp_path / "run" / "record" / "local-0.jsonl"
    data = path.read_bytes()
    for cut in range(len(data) // 2, len(data), len(data) // 7):
        path.write_bytes(data[:cut])
        record = Record(tmp_path / "run")
        assert not record.problems
        known = len(record.rows())
        path.write_bytes(data)
        assert record.refresh()
        assert known <= len(record.rows()) == 32
        assert not record.refresh()
    record = Record(tmp_path / "run")
    os.truncate(path, 100)
    record.refresh()
    assert record.rows() == []


def test_what_cannot_be_read_of_a_record_is_reported_and_left_out(whole_run: Path, tmp_path: Path):
    shutil.copytree(whole_run, tmp_path / "run")
    folder = tmp_path / "run" / "record"
    heads = (folder / "local-0.jsonl").read_text().splitlines()
    (folder / "rollout-7.jsonl").write_text('{"practicum": "record", "format": 99}\n{}\n')
    (folder / "local-0.jsonl").write_text("\n".join([heads[0], heads[1][:40], *heads[2:], "[]", ""]))
    (folder / "local-0.bin").write_text("nothing\n")
    record = Record(tmp_path / "run")
    assert len(record.rows()) == 32
    row = record.row(1, (0, 0, 0))
    assert row is not None
    assert row.columns == {}
    for part in ("format 99", "cut off", "not of this format", "can't be read"):
        assert any(part in problem for problem in record.problems), part
