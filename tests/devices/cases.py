"""Runs on the CPU and on the pretend GPU, compared: `python -m tests.devices.cases FOLDER NAME…`.

A process of its own, because torch takes a new kind of device only before the first backward pass. Prints one
JSON object: of each case what differs, or its error; nothing if all is well.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from practicum import devices
from practicum.algorithms import token_logprobs
from practicum.commands.doctor import examine
from practicum.learning.packing import Packed
from practicum.trainer.run import train_loaded

from ..teachers.tiny_teachers import save_adapter, save_teacher
from ..trainer.recipes import TINY, tiny
from ..trainer.test_experts_and_pictures import EYES, MOE, PICTURES, UNEVEN
from ..trainer.test_run import metrics_of, weights_of, without_times
from .pretend_gpu import NAME, pretend_gpu

TRAIN: dict[str, Any] = {"steps": 2, "prompts": 3, "lr": 1e-3, "minibatches": 2, "microbatch_tokens": 256}
CUT: dict[str, Any] = {
    "train": TRAIN,
    "eval": {"rows": 4},
    "reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]},
}
KL_LOSS = {"kl": {"place": "loss", "coefficient": 0.1}}
PPO = {"advantage": "gae", "loss": "ppo_clip", "kl": {"place": "reward", "coefficient": 0.1}}
ASLEEP = {"runtime": TINY["runtime"] | {"teachers_gb": 1e-6}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"mismatch": "token"}},
    "agent": {"agent": {"loop": "retry", "message": "no"}, "algorithm": KL_LOSS},
    "ppo": {"algorithm": PPO, "critic": {}},
    "moe": {"model": MOE, **UNEVEN},
    "vision": {"model": EYES, "tasks": PICTURES, "algorithm": PPO, "critic": {}},
    "sampled": {"distill": {}},
    "top_k": {"distill": {"signal": "top_k", "top_k": 4}, **ASLEEP},
    "adapter": {"model": TINY["model"] | {"lora": {"rank": 4}}, "algorithm": PPO, "critic": {}},
    "full": {"distill": {"signal": "full", "divergence": "jsd"}},
    "copied": {"distill": {}, "teachers": {"old": {"student": {"every": 1}}}},
    "adapters": {"distill": {"signal": "full"}, "model": {"lora": {"rank": 4}}, "teachers": "adapters"},
    "small": {"model": TINY["model"] | {"dtype": "bfloat16"}},
    "lag": {"rollout": TINY["rollout"] | {"lag": 1}},
    "state": {"train": TRAIN},
}
"""Sections of the tiny recipe. A recipe that distils and has no teachers gets two of different widths, or two
adapters on the student's base."""
ON_GPU: dict[str, dict[str, Any]] = {"state": {"train": CASES["state"]["train"] | {"offload": "host"}}}
"""Sections that are others there, and change no number."""
LEFT_BEHIND = "left_behind"
DOCTOR = "doctor"
CLOSE = ("moe",)
"""Cases whose numbers are only close: on a CPU experts have their own product."""


def run(folder: Path, sections: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Metrics and weights of a run that is stopped after its first step and resumed."""
    folder.mkdir()
    recipe = tiny(folder, "train.steps=1", **(CUT | sections))
    train_loaded(recipe, folder / "run")
    train_loaded(tiny(folder, **(CUT | sections)), folder / "run", resume=True)
    return without_times(metrics_of(folder / "run")), weights_of(folder / "run")


def difference(name: str, folder: Path) -> str:
    """Where the run on the pretend GPU differs from the CPU's; empty if nowhere."""
    sections = dict(CASES[name])
    if sections.get("teachers") == "adapters":
        base = save_teacher(folder / "base", seed=5)
        sections["model"] = {"path": base} | sections["model"]
        for i, task in enumerate(TINY["tasks"]):
            save_adapter(folder / task, base, seed=i)
        sections["teachers"] = {task: {"adapter": str(folder / task)} for task in TINY["tasks"]}
    elif "distill" in sections and "teachers" not in sections:
        sections["teachers"] = {
            task: {"model": save_teacher(folder / task, seed=i, hidden=32 + 16 * i)}
            for i, task in enumerate(TINY["tasks"])
        }
    here = run(folder / "cpu", sections)
    with pretend_gpu() as device:
        there = run(folder / "gpu", sections | ON_GPU.get(name, {}))
        log = (folder / "gpu" / "run" / "log.txt").read_text()
    if f"the student samples on {device}" not in log:
        return f"the log does not say that the student is on {device}"
    return _metrics(here[0], there[0], name in CLOSE) or _weights(here[1], there[1], name in CLOSE)


def left_behind(folder: Path) -> str:
    """The control: targets that the learner forgets to move must end the run; empty if they do."""
    moved = Packed.to

    def forgetful(self: Packed, device: torch.device) -> Packed:
        return replace(moved(self, device), target_M=self.target_M)

    Packed.to = forgetful
    try:
        with pretend_gpu():
            run(folder / "gpu", {})
    except RuntimeError as error:
        return "" if "on the pretend device and one on the CPU" in str(error) else str(error)
    finally:
        Packed.to = moved
    return "the run went on"


def examined(_: Path) -> str:
    """What `practicum doctor` finds wrong on the pretend GPU, or where it did not look."""
    with pretend_gpu():
        found = {finding.name: finding for finding in examine()}
    wrong = [str(finding) for finding in found.values() if finding.result == "wrong"]
    return "\n".join(wrong) or ("" if f"1 × {NAME}" in found["accelerators"].text else str(found))


def _metrics(mine: list[dict[str, Any]], others: list[dict[str, Any]], close: bool) -> str:
    for step, (a, b) in enumerate(zip(mine, others, strict=True)):
        if a.keys() != b.keys():
            return f"step {step}: only one of them has {sorted(a.keys() ^ b.keys())}"
        for key in a.keys() - {key for key in a if key.endswith("/seconds")}:
            if not (_near(a[key], b[key]) if close else a[key] == b[key]):
                return f"step {step}: {key} is {a[key]!r} on the CPU and {b[key]!r} on the pretend GPU"
    return ""


def _near(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, str) else abs(a - b) <= 1e-4 * max(1.0, abs(a))


def _weights(mine: dict[str, torch.Tensor], others: dict[str, torch.Tensor], close: bool) -> str:
    """Return the names of weights that differ.

    Close ones differ by more than a ten-thousandth of a step of the optimizer in the root mean square: AdamW
    divides by the gradient's size, so single elements with a gradient near 0 show its rounding.
    """
    most = 1e-4 * TRAIN["lr"] if close else 0.0
    return ", ".join(
        name for name in mine if not (mine[name] - others[name]).double().square().mean().sqrt() <= most
    )


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    # So that numbers are added up in the CPU's order.
    token_logprobs.GPU_BLOCK_LOGITS = token_logprobs.BLOCK_LOGITS
    devices.FUSED_OPTIMIZERS = (*devices.FUSED_OPTIMIZERS, NAME)
    with pretend_gpu() as device:  # torch counts its devices in the first backward pass
        torch.ones(1, device=device, requires_grad=True).backward()
    found = {}
    for name in names:
        (folder / name).mkdir()
        try:
            check = {LEFT_BEHIND: left_behind, DOCTOR: examined}.get(name, partial(difference, name))
            found[name] = check(folder / name)
        except Exception as error:
            frames = "".join(traceback.format_tb(error.__traceback__)[-6:])
            found[name] = f"{frames}{type(error).__name__}: {str(error)[:500]}"
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
