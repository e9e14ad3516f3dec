"""Map keys of older versions to advice about what to write instead."""

from __future__ import annotations

_CHECK_NAMES = """
    weight_version fingerprint fingerprint_max logprob_gap sample_size sample_size_min masks groups advantages
    teacher_shares store_empty finite
"""
_CHECKS = "set checks: error, warn or off for all checks; the thresholds are constants"
_EVAL = "greedy responses are always evaluated, samples are drawn at temperature 1, a pass is reward 1"
_MISMATCH = "set algorithm.mismatch_cap, to which larger ratios are truncated"
_RETRIES = "remove it: a failed request is sent up to 4 times within deadline_s"
_START = "remove it: a process has half an hour to load its model"
_DEVICES = "remove it, or set engine: vllm and vllm.tensor_parallel_size, as other processes have one device"
_RENAMED = {
    "agent.calls": "agent.tool_call_format",
    "distill.through": "distill.apply_as",
    "model.make": "model.random_init",
    "reward.watch": "reward.log_only",
    "rollout.slots": "rollout.max_num_seqs",
    "route.to": "route.map",
    "teachers.*.before": "teachers.*.prompt_prefix",
    "train.clip_norm": "train.max_grad_norm",
    "train.minibatch_rows": "train.minibatch_size",
}
REMOVED = {
    **{old: f"rename it to {new.rpartition('.')[2]}" for old, new in _RENAMED.items()},
    "agent.tools.*.isolation": "remove it: the tool python always runs in bubblewrap",
    "async": "set rollout.lag instead of async.lag",
    **{f"checks.{name}": _CHECKS for name in _CHECK_NAMES.split()},
    **dict.fromkeys(("agent.feedback", "agent.ask_summary"), "set agent.message"),
    "agent.tools.*.memory_mb": "remove it: a program has 256 MiB of memory",
    "agent.tools.*.output_chars": "remove it: 2,000 characters of a result are kept",
    "algorithm.whiten": "remove it: GAE's advantages are always whitened",
    "critic.minibatch_rows": "remove it: the critic's mini-batches are the student's",
    "critic.clip": "remove it: the value loss is clipped at 0.2",
    "pools.teachers": "remove it: each process of placement own takes the devices it needs",
    **dict.fromkeys(("reward.models.*.retries", "teachers.*.retries"), _RETRIES),
    "reward.models.*.scale": "remove it and set weight: a judge's number is divided by 10",
    **dict.fromkeys(("reward.models.*.placement.own.start_s", "teachers.*.placement.own.start_s"), _START),
    **dict.fromkeys(("reward.models.*.placement.own.devices", "teachers.*.placement.own.devices"), _DEVICES),
    "rollout.min_p": "remove it, or use rollout.top_p",
    "runtime.object_store_gb": "use ray start --object-store-memory, and set runtime.address",
    "runtime.store_units": "remove it: each of pools.train.nodes has one",
    "runtime.weight_transport": "remove it: nixl is used for weights on a GPU if it is installed",
    "tasks.*.streaming": "remove it; split: train[:10000] takes the first rows",
    "tasks.*.images": "name the column images, or rename it by map",
    **dict.fromkeys(("rollout.vllm.kv_gb", "teachers.*.vllm.kv_gb"), "set kv_cache_memory_bytes"),
    **dict.fromkeys(("rollout.vllm.start_s", "teachers.*.vllm.start_s", "runtime.start_s"), _START),
    **dict.fromkeys(("rollout.vllm.options", "teachers.*.vllm.options"), "write its keys directly in vllm"),
    **dict.fromkeys(
        ("rollout.vllm.tensor_parallel", "teachers.*.vllm.tensor_parallel"),
        "rename it to tensor_parallel_size",
    ),
    "rollout.vllm.threads": "set runtime.threads",
    "teachers.*.vllm.threads": "set runtime.threads, or placement: {own: {threads: 2}}",
    "algorithm.dual_clip": "remove it: no loss has a second clip",
    **dict.fromkeys(("algorithm.kl.clamp", "algorithm.log_ratio_clamp"), "remove it: nothing is clamped"),
    "algorithm.kl.horizon": "remove it: an adaptive weight changes over 10,000 sessions",
    **{f"algorithm.mismatch.{name}": _MISMATCH for name in ("floor", "outside", "reject", "cap")},
    "algorithm.mismatch.weights": "set algorithm.mismatch to its value",
    "agent.on_failure.retry": "write on_failure: retry, for up to two retries",
    "rollout.replicas": "remove it: a pool has one engine per device, or per tensor_parallel_size devices",
    "train.eps": "remove it: AdamW's epsilon is 1e-8; set train.optimizer to a function for another",
    "checkpoint.every_minutes": "checkpoints are written every 10 minutes; checkpoint.every adds others",
    "checkpoint.keep_best": "the checkpoint with the best eval/greedy is kept if eval.every is set",
    "distill.clamp": "remove it: divergences are not clamped",
    "eval.greedy": "set eval.rows to 0 to have no evaluation",
    **dict.fromkeys(("eval.temperature", "eval.pass_threshold"), _EVAL),
    "model.lora.dropout": "remove it: sampling and training must see one distribution",
    "model.lora.init": "remove it: the first matrix is drawn as PEFT does by default",
    "rollout.keep_tokens": "remove it: the engine keeps max_num_seqs × context tokens",
    "rollout.repeatable": "remove it: every run repeats bit for bit",
    "runtime.store_s": "remove it: the store's deadline is the smaller of a minute and runtime.stage_s",
    "runtime.teachers_host_gb": "remove it: models that do not fit runtime.teachers_gb sleep in host memory",
    "teachers.*.memory_gb": "remove it: practicum plan shows the memory of each teacher",
    "model.random_init.kv_heads": "remove it: a model has half as many as heads",
    "model.random_init.head_dim": "remove it: a head is hidden / heads wide",
    "model.random_init.experts_per_token": "remove it: a token takes two experts",
    "train.replay_experts": "remove it: experts are replayed if the engine reports them",
    "buffer": "set refills: 4, the number of further rollouts that replace groups with equal rewards",
    "train.compile": "remove it: the learner does not compile its model",
    "track.eval_prompts": "remove it: every answer of an evaluation is written to eval.jsonl",
    "track.own": "name your trackers in track.to",
    "track.tensorboard": "use track.to: [tensorboard]",
    "track.wandb": "use track.to: [wandb/PROJECT]",
    "track.trackio": "use track.to: [trackio/PROJECT]",
    **dict.fromkeys(("track.trajectories", "track.groups"), "use track.record, the number of whole groups"),
}
"""Advice for each removed key. * stands for a teacher's name or the number of a list item."""
