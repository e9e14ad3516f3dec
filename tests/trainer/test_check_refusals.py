"""What `train` refuses `check` refuses, with the same sentence: recipes of users, by the command line."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from practicum.cli import app
from practicum.errors import RecipeErrors
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


def add_a_token(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<think>"])


def end_turns_with_padding(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", "<pad>")


def remove_the_tokenizer(folder: Path) -> dict[str, Any]:
    path = Path(save_teacher(folder / "model", seed=1))
    for file in path.glob("*token*"):
        file.unlink()
    return {"path": str(path)}


REFUSED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "algorithm.clip_low": lambda folder: {"algorithm": {"clip_low": 1.0}},
    "train.minibatch_size": lambda folder: {"train": {"steps": 4, "prompts": 4, "minibatch_size": 17}},
    "eval.every": lambda folder: {"tasks": {"t": {"file": rows(folder, 4)}}, "eval": {"rows": 4, "every": 1}},
    "tasks.few": lambda folder: {"tasks": {"few": {"file": rows(folder, 3)}}},
    "tasks.t.file": lambda folder: {"tasks": {"t": {"file": str(folder)}}},
    "tasks.long.file": lambda folder: {"tasks": {"long": {"file": "x" * 300 + ".jsonl"}}},
    "rollout.top_k": lambda folder: {"rollout": {"max_new_tokens": 6, "top_k": 64}},
    "model.path": lambda folder: {"model": student(folder, add_a_token)},
    "model.path (bare)": lambda folder: {"model": remove_the_tokenizer(folder)},
    "model.path (long)": lambda folder: {"model": {"path": "x" * 300}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_both_commands_refuse_a_recipe_at_its_key(tmp_path: Path, key: str):
    with suppress(RecipeErrors):  # of what is static
        tiny(tmp_path, **REFUSED[key](tmp_path))
    refused(tmp_path, f"{key.split()[0]}: ")


def test_a_cluster_that_this_machine_is_too_small_for(tmp_path: Path):
    tiny(tmp_path, runtime={"kind": "ray", "cpus": 1, "reward_workers": 2})
    refused(tmp_path, "runtime.cpus")


def test_tasks_share_the_prompts_of_a_step(tmp_path: Path):
    tiny(tmp_path, tasks={"mine": {"file": rows(tmp_path, 2)}, "copy": {"kind": "copy"}})
    assert CliRunner().invoke(app, ["check", str(tmp_path / "recipe.yaml")]).exit_code == 0


def test_a_run_folder_that_can_not_be(tmp_path: Path):
    (tmp_path / "file").touch()
    tiny(tmp_path, out=str(tmp_path / "file"))
    texts = [said("check", tmp_path), said("train", tmp_path)]
    assert texts[0] == texts[1]
    assert f"{tmp_path / 'file'} can't be the run folder: {tmp_path / 'file'} is a file" in texts[0]


def test_a_reward_of_a_batch_that_gives_one_number(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def one(samples): return [1.0]\n")
    tiny(tmp_path, reward={"functions": [{"use": "mine:one", "batch": True}]})
    assert "returned 1 values, expected a list with one number for each sample" in said("check", tmp_path)
    tiny(tmp_path, reward="mine:one")
    assert "returned [1.0], expected a finite number (with batch: true" in said("check", tmp_path)


def test_a_special_token_that_nothing_brings_up_needs_no_embedding(tmp_path: Path):
    def add(tokenizer: Any) -> None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})

    tiny(tmp_path, model=student(tmp_path, add))
    assert CliRunner().invoke(app, ["check", str(tmp_path / "recipe.yaml")]).exit_code == 0


def test_a_chat_template_whose_turns_never_stop(tmp_path: Path):
    sections: dict[str, Any] = {"model": student(tmp_path, end_turns_with_padding)}
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
