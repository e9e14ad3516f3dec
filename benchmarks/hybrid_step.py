"""The GRPO step of `grpo_step.py` with a hybrid: every other layer is a gated delta rule, as in Qwen3.5."""

from __future__ import annotations

from benchmarks import grpo_step

if __name__ == "__main__":
    grpo_step.race("hybrid_step", {1: 3}, hybrid=True)
