"""Keys that recipes no longer have, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

_CHECKS = "set checks: error, warn or off for all checks; the thresholds are constants"
_EVAL = "a greedy answer is always scored, samples are drawn at temperature 1, and a pass has reward 1"
_MISMATCH = "set algorithm.mismatch.cap: ratios above it become it"
REMOVED = {
    "agent.tools.*.isolation": "remove it: the tool python always runs in bubblewrap",
    "async": "set rollout.lag instead of async.lag",
    **dict.fromkeys(("checks.weight_version", "checks.fingerprint", "checks.fingerprint_max"), _CHECKS),
    **dict.fromkeys(("checks.logprob_gap", "checks.sample_size", "checks.sample_size_min"), _CHECKS),
    **dict.fromkeys(("checks.masks", "checks.groups", "checks.advantages"), _CHECKS),
    **dict.fromkeys(("checks.teacher_shares", "checks.store_empty", "checks.finite"), _CHECKS),
    "algorithm.dual_clip": "remove it: no loss has a second clip",
    "algorithm.kl.clamp": "remove it: log-ratios are not clamped",
    "algorithm.kl.horizon": "remove it: an adaptive weight changes over 10,000 sessions",
    "algorithm.log_ratio_clamp": "remove it: log-ratios are not clamped",
    "algorithm.mismatch.floor": _MISMATCH,
    "algorithm.mismatch.outside": _MISMATCH,
    "algorithm.mismatch.reject": _MISMATCH,
    "checkpoint.every_minutes": "checkpoints are written every 10 minutes; checkpoint.every adds others",
    "checkpoint.keep_best": "the checkpoint with the best eval/greedy is kept if eval.every is set",
    "distill.clamp": "remove it: divergences are not clamped",
    "eval.greedy": "set eval.rows to 0 to have no evaluation",
    "eval.temperature": _EVAL,
    "eval.pass_threshold": _EVAL,
    "model.lora.dropout": "remove it: sampling and training must see one distribution",
    "model.lora.init": "remove it: the first matrix is drawn as PEFT does by default",
    "rollout.keep_tokens": "remove it: the engine keeps as many tokens as its slots hold",
    "rollout.repeatable": "remove it: every run repeats bit for bit",
    "runtime.store_s": "remove it: the store has a minute, or runtime.stage_s if that is less",
    "runtime.teachers_host_gb": "remove it: models that do not fit runtime.teachers_gb sleep in host memory",
    "teachers.*.memory_gb": "remove it: practicum plan shows the memory of each teacher",
    "train.compile": "remove it: the learner does not compile its model",
    "track.eval_prompts": "remove it: every answer of an evaluation is written to eval.jsonl",
    "track.own": "name your trackers in track.to",
    "track.tensorboard": "use track.to: [tensorboard]",
    "track.wandb": "use track.to: [wandb/PROJECT]",
    "track.trackio": "use track.to: [trackio/PROJECT]",
    "track.trajectories": "use track.record, the number of whole groups per step",
    "track.groups": "use track.record, the number of whole groups per step",
}
"""A key, with * for the name of a teacher or the number of a list's item, and the advice for its users."""


def advice_for_removed(path: Sequence[str | int]) -> str | None:
    """Return the advice for a key that was removed, or None for a key that never existed."""
    key = ".".join(map(str, path))
    return next((advice for pattern, advice in REMOVED.items() if fnmatchcase(key, pattern)), None)
