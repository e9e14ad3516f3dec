"""What `train` refuses `check` refuses, with the same sentence: recipes of users, by the command line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from practicum.cli import app
from practicum.sessions.tools.python_tool import sandbox_problem
from tests.teachers.tiny_teachers import save_teacher

from .recipes import tiny

OWN_LINES = ("loading torch …", "tiny · starting")


def said(command: str, folder: Path, *options: str) -> str:
    """What a command that is refused says, without the lines that each has at its start."""
    path = str(folder / "recipe.yaml")
    result = CliRunner().invoke(app, [command, path, *options])
    assert result.exit_code == 2, result.output
    lines = [line for line in result.output.splitlines() if not line.startswith(OWN_LINES)]
    return "\n".join(lines)


def refused(folder: Path, *sentences: str) -> None:
    """Both commands refuse the recipe, in the same words, and nothing is written."""
    texts = [said("check", folder), said("train", folder, "--out", str(folder / "run"))]
    assert texts[0] == texts[1]
    for sentence in sentences:
        assert sentence in texts[0]
    assert not (folder / "run").exists()


def rows(folder: Path, count: int, **columns: Any) -> str:
    path = folder / "rows.jsonl"
    row = {"prompt": "1+1=", "answer": "2"} | columns
    path.write_text((json.dumps(row) + "\n") * count)
    return str(path)


def student(folder: Path, change: Callable[[Any], None]) -> dict[str, Any]:
    """A model of the user's whose tokenizer was changed."""
    path = save_teacher(folder / "model", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    change(tokenizer)
    tokenizer.save_pretrained(path)
    return {"path": path}


def ends_turns_with_padding(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", "<pad>")


EVERY = {"rows": 4, "every": 1}
STATIC = {
    "algorithm.clip_low: found 1 with algorithm.loss ppo_clip": {"algorithm": {"clip_low": 1.0}},
    "train.minibatch_rows: found 17 with 16 rows per step": {
        "train": {"steps": 4, "prompts": 4, "minibatch_rows": 17}
    },
}


@pytest.mark.parametrize("sentence", STATIC)
def test_values_that_can_not_work_together(tmp_path: Path, sentence: str):
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(Exception, match="problem"):
        tiny(tmp_path, **STATIC[sentence])
    refused(tmp_path, sentence)


def test_evaluation_without_rows(tmp_path: Path):
    tiny(tmp_path, tasks={"mine": {"file": rows(tmp_path, 4)}}, eval=EVERY)
    refused(tmp_path, "eval.every: found 1 and no evaluation rows", "set tasks.mine.eval_file")


def test_fewer_rows_than_prompts_of_a_step(tmp_path: Path):
    tiny(tmp_path, tasks={"mine": {"file": rows(tmp_path, 3)}})
    refused(tmp_path, "tasks.mine: found 3 rows of", "for 4 prompts of a step", "lower train.prompts")
    loaded = tiny(tmp_path, tasks={"mine": {"file": rows(tmp_path, 2)}, "copy": {"kind": "copy"}})
    assert loaded.recipe.train.prompts == 4
    assert CliRunner().invoke(app, ["check", str(tmp_path / "recipe.yaml")]).exit_code == 0


def test_a_folder_in_place_of_a_file_of_rows(tmp_path: Path):
    tiny(tmp_path, tasks={"mine": {"file": str(tmp_path)}})
    named = f"tasks.mine.file: found the folder '{tmp_path}'"
    refused(tmp_path, f"{tmp_path / 'recipe.yaml'}: 1 problem", named, "tasks.mine.dataset takes")


def test_a_run_folder_that_can_not_be(tmp_path: Path):
    (tmp_path / "file").touch()
    tiny(tmp_path, out=str(tmp_path / "file"))
    texts = [said("check", tmp_path), said("train", tmp_path)]
    assert texts[0] == texts[1]
    assert f"{tmp_path / 'file'} can't be the run's folder: {tmp_path / 'file'} is a file" in texts[0]


def test_a_reward_of_a_batch_that_gives_one_number(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def one(samples): return [1.0]\n")
    tiny(tmp_path, reward={"functions": [{"use": "mine:one", "batch": True}]})
    assert "returned 1 values, expected a list with one number for each sample" in said("check", tmp_path)
    tiny(tmp_path, reward="mine:one")
    assert "returned [1.0], expected a finite number (with batch: true" in said("check", tmp_path)


def test_more_best_tokens_than_the_vocabulary_has(tmp_path: Path):
    tiny(tmp_path, rollout={"max_new_tokens": 6, "top_k": 64})
    refused(tmp_path, "rollout.top_k: found 64 (file:", "), expected at most the vocabulary's 63 tokens")


def test_tokens_without_an_embedding(tmp_path: Path):
    tiny(tmp_path, model=student(tmp_path, lambda tokenizer: tokenizer.add_tokens(["<think>"])))
    refused(tmp_path, "a tokenizer of 64 tokens and a model with 63 embeddings", "none for '<think>'")


def test_a_special_token_that_nothing_brings_up_needs_no_embedding(tmp_path: Path):
    def add(tokenizer: Any) -> None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})

    tiny(tmp_path, model=student(tmp_path, add))
    assert CliRunner().invoke(app, ["check", str(tmp_path / "recipe.yaml")]).exit_code == 0


def test_a_chat_template_whose_turns_never_stop(tmp_path: Path):
    sections: dict[str, Any] = {"model": student(tmp_path, ends_turns_with_padding)}
    tiny(tmp_path, **sections)
    command = ["check", str(tmp_path / "recipe.yaml")]
    assert CliRunner().invoke(app, command).exit_code == 0, "prompts without a chat have no such turns"
    tiny(tmp_path, **sections, tasks={"copy": {"kind": "copy", "chat": True}})
    refused(tmp_path, "a chat template that ends turns with <pad>", "set rollout.stop to ['<pad>']")
    mended = CliRunner().invoke(app, [*command, "--set", "rollout.stop=['<pad>']"])
    assert mended.exit_code == 0, mended.output


@pytest.mark.parametrize(
    ("module", "extra", "sections"),
    [
        ("wandb", "wandb", {"track": {"to": ["wandb/project"]}}),
        ("tensorboard", "tensorboard", {"track": {"to": ["tensorboard"]}}),
        ("ray", "ray", {"runtime": {"kind": "ray"}}),
        ("vllm", "vllm", {"rollout": {"engine": "vllm", "max_new_tokens": 6}}),
        ("datasets", "datasets", {"tasks": {"mine": {"dataset": "somebody/data"}}}),
        ("math_verify", "math", {"reward": {"functions": [{"use": "math_verify"}]}}),
    ],
)
def test_an_extra_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str, sections: dict[str, Any]
):
    monkeypatch.setitem(sys.modules, module, None)
    tiny(tmp_path, **sections)
    refused(tmp_path, f"needs an extra: pip install 'practicum[{extra}]'")


def test_the_tool_python_without_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sandbox_problem.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    tiny(tmp_path, agent={"loop": "tool_use", "tools": ["calculator", "python"]})
    refused(tmp_path, "agent.tools[1].use", "apt-get install bubblewrap")
    sandbox_problem.cache_clear()


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.path", {"model": {"path": "x" * 300}}),
        ("tasks.t.file", {"tasks": {"t": {"file": "x" * 300 + ".jsonl"}}}),
    ],
)
def test_a_name_that_no_file_system_takes(tmp_path: Path, key: str, sections: dict[str, Any]):
    tiny(tmp_path, **sections)
    refused(tmp_path, f"{key}: ")
