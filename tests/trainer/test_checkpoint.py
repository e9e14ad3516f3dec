from pathlib import Path

import pytest

from practicum.errors import PracticumError
from practicum.trainer.checkpoints import Checkpoints, Progress


def save(checkpoints: Checkpoints, step: int, best: int | None = None) -> Path:
    def write(folder: Path) -> None:
        (folder / "student").mkdir()
        (folder / "part").write_text(str(step))

    return checkpoints.save(Progress(step=step, best_step=best), write)


def test_keeps_the_last_n_and_the_best(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in range(1, 6):
        save(checkpoints, step, best=2 if step >= 2 else None)
    assert checkpoints.steps() == [2, 4, 5]
    path, progress = checkpoints.latest()
    assert (path / "part").read_text() == "5"
    assert progress == Progress(step=5, best_step=2)


def test_a_write_that_fails_leaves_the_older_checkpoint_and_no_half_one(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, 1)

    def breaks(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(Progress(step=2), breaks)
    assert checkpoints.steps() == [1]
    save(checkpoints, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_resuming_without_a_checkpoint_says_so(tmp_path: Path):
    with pytest.raises(PracticumError, match="has no checkpoint"):
        Checkpoints(tmp_path, 1).latest()
