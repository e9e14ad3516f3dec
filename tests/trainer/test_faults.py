"""What machines do to runs: damaged files, full and read-only disks, jumping clocks, too few file handles."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.errors import PracticumError
from practicum.trainer.run import train_loaded

from .recipes import tiny
from .test_run import same_run, stop_after

RECIPE: dict[str, Any] = {
    "train": {"steps": 4, "prompts": 2, "lr": 1e-3},
    "rollout": {"samples": 2, "max_new_tokens": 3, "max_num_seqs": 8},
    "eval": {"rows": 2, "every": 1},
    "checkpoint": {"every": 1, "keep_last": 2},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    train_loaded(tiny(folder, **RECIPE), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped in its third step: it has checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_loaded(tiny(folder, **RECIPE), folder / "run")
    return folder / "run"


def _interrupt() -> None:
    raise KeyboardInterrupt


def resumed(folder: Path, run: Path) -> str:
    """The log of a run that continues."""
    train_loaded(tiny(folder, **RECIPE), run, resume=True)
    return (run / "log.txt").read_text()


@pytest.mark.parametrize("name", ["progress.json", "random.pt", "student"])
def test_a_checkpoint_that_can_not_be_read_is_named_and_the_one_before_is_used_without_it(
    tmp_path: Path, half: Path, whole: Path, name: str
):
    run = Path(shutil.copytree(half, tmp_path / "run", symlinks=True))
    newest = run / "checkpoints/step-000002"
    files = [path for path in (newest, *newest.rglob("*")) if path.is_file() and name in str(path)]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(PracticumError, match="step-000002"):
        train_loaded(tiny(tmp_path, **RECIPE), run, resume=True)
    shutil.rmtree(newest)
    train_loaded(tiny(tmp_path, **RECIPE), run, resume=True)
    same_run(whole, run)


def test_records_that_were_cut_are_an_error_that_names_them(tmp_path: Path, half: Path):
    run = Path(shutil.copytree(half, tmp_path / "run", symlinks=True))
    (run / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(PracticumError, match=r"metrics\.jsonl has 0 bytes"):
        train_loaded(tiny(tmp_path, **RECIPE), run, resume=True)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A folder that is a disk of its own."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_takes_no_checkpoint_is_named_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, trouble: str
):
    with small_disk(tmp_path / "disk", "16m"):
        run = tmp_path / "disk" / "run"
        tiny(tmp_path, **RECIPE)
        ballast = tmp_path / "disk" / "ballast"

        def happen() -> None:
            if trouble == "full":
                subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4096"], check=False)
            else:
                place = str(run / "checkpoints")
                subprocess.run(["mount", "--bind", place, place], check=True)
                subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)

        command = ["train", str(tmp_path / "recipe.yaml"), "--out", str(run)]
        with monkeypatch.context() as patch:
            stop_after(patch, 3, happen)
            result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        said = {"full": "No space left on device", "read-only": "Read-only file system"}[trouble]
        assert said in result.output
        assert "has a checkpoint of step 2: --resume continues from it" in result.output
        assert "Traceback" not in result.output
        if trouble == "full":
            ballast.unlink()
        else:
            subprocess.run(["umount", str(run / "checkpoints")], check=True)
        resumed(tmp_path, run)
        same_run(whole, run)


def test_two_runs_never_share_a_folder(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("practicum.trainer.run_folder._LOCK_S", 0.01)
    recipe, refused = tiny(tmp_path, **RECIPE), []

    def start_another(row: dict[str, Any]) -> None:
        for resume in (True, False):
            with pytest.raises(PracticumError, match=r"is in use by another run \(process \d+ on ") as raised:
                train_loaded(recipe, tmp_path / "run", quiet=True, resume=resume, fresh=not resume)
            refused.append(raised.value)

    train_loaded(recipe, tmp_path / "run", on_step=start_another)
    assert len(refused) == 2 * 5
    same_run(whole, tmp_path / "run")
    assert not (tmp_path / "run/.lock").exists()
