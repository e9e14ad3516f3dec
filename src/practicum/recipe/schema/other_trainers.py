"""Map keys and values of TRL, verl and prime-rl to their equivalents in a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BATCH = "train.prompts and rollout.samples: their product is the number of responses per step"
_MICROBATCH = "train.microbatch_tokens: it splits the batch by tokens and doesn't change the result"
_STEPS = "train.steps, the number of rollout batches: epochs × rows / train.prompts"
_CONTEXT = "rollout.context (prompt and response), and tasks.NAME.too_long for prompts that don't fit"
_DATA = "tasks: {NAME: {dataset: HUB_NAME}} or {file: rows.jsonl}"
_EVAL_DATA = "tasks.NAME.eval_split or eval_file"
_REWARD = 'reward.functions: ["module:function"]'
_KL = "algorithm.kl: {place: loss, coefficient: VALUE}"
_MINIBATCHES = "train.minibatches: the number of optimizer steps per batch, not their size"
_VLLM_MEMORY = "rollout.vllm: {kv_cache_memory_bytes: BYTES}"
_NODES = "runtime: ray and pools.train: {nodes: N, devices: DEVICES_OF_A_NODE}"
_SCALE = "algorithm.advantage: dr_grpo for no division by the standard deviation, else grpo"
_GROUPS = "refills: 4, the further rollouts that replace groups with equal rewards"
_TEACHER = "teachers: {NAME: {model: PATH}} and distill"

OTHER_KEYS = {
    # common
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "batch_size": _BATCH,
    "train_batch_size": "train.prompts",
    "group_size": "rollout.samples",
    "grad_clip": "train.max_grad_norm",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup_steps",
    "optim.lr": "train.lr",
    "critic.optim.lr": "critic.lr",
    **dict.fromkeys(("output_dir", "default_local_dir"), "out"),
    **dict.fromkeys(("run_name", "experiment_name", "project_name"), "name"),
    **dict.fromkeys(("logger", "report_to", "wandb.project"), "track.to"),
    **dict.fromkeys(("max_model_len", "max_length", "max_seq_length", "seq_len"), "rollout.context"),
    **dict.fromkeys(("max_turns", "max_tool_calling_iterations"), "agent.turns"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "train.betas"),
    "model_name_or_path": "model.path",
    **dict.fromkeys(("model_name", "model.name", "name_or_path"), "model.path"),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision"), "train.autocast: bfloat16"),
    **dict.fromkeys(
        ("peft_config", "lora_config", "lora_rank", "lora_r", "use_peft"), "model.lora: {rank: 16}"
    ),
    # TRL
    "num_generations": "rollout.samples",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": _CONTEXT,
    "beta": _KL,
    "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "num_iterations": "train.epochs",
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), _MINIBATCHES),
    "scale_rewards": _SCALE,
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _MICROBATCH,
    "num_train_epochs": _STEPS,
    "use_vllm": "rollout.engine: vllm",
    "vllm_mode": "rollout.engine: vllm; pools.rollout gives it its own devices",
    "vllm_tensor_parallel_size": "rollout.vllm: {tensor_parallel_size: VALUE}",
    "vllm_gpu_memory_utilization": _VLLM_MEMORY,
    "vllm_importance_sampling_correction": "algorithm.mismatch",
    "importance_sampling_level": "algorithm.loss: gspo for one ratio per response, else ppo_clip",
    "reward_funcs": _REWARD,
    "reward_weights": "reward.functions: [{use: NAME, weight: 0.5}]",
    "train_dataset": _DATA,
    "eval_dataset": _EVAL_DATA,
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_sync_steps"), "teachers: {NAME: {student: {every: STEPS}}}"
    ),
    "teacher_model": _TEACHER,
    "top_entropy_quantile": "stages with a function of your own, as recipes/sort/top_entropy.yaml has",
    "entropy_coef": "algorithm.entropy",
    "mask_truncated_completions": "a reward function that reads sample.finish",
    "log_completions": "track.record",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every",
    "teacher_model_name_or_path": _TEACHER,
    # verl
    "max_response_length": "rollout.max_new_tokens",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "kl_coef": "algorithm.kl: {place: reward, coefficient: VALUE}",
    "kl_loss_coef": _KL,
    "use_kl_loss": "algorithm.kl: {place: loss}",
    "use_kl_in_reward": "algorithm.kl: {place: reward}",
    "norm_adv_by_std_in_grpo": _SCALE,
    "entropy_coeff": "algorithm.entropy",
    "ppo_epochs": "train.epochs",
    "ppo_mini_batch_size": _MINIBATCHES,
    **dict.fromkeys(
        (
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "use_dynamic_bsz",
        ),
        _MICROBATCH,
    ),
    "n": "rollout.samples",
    "tensor_model_parallel_size": "rollout.vllm: {tensor_parallel_size: VALUE}",
    "gpu_memory_utilization": _VLLM_MEMORY,
    "engine_kwargs": "rollout.vllm",
    "multi_turn": "agent.loop and agent.tools",
    "train_files": _DATA,
    "val_files": _EVAL_DATA,
    "filter_overlong_prompts": "tasks.NAME.too_long: skip",
    "custom_reward_function": _REWARD,
    "filter_groups": _GROUPS,
    "total_epochs": _STEPS,
    "total_training_steps": "train.steps",
    **dict.fromkeys(("nnodes", "n_gpus_per_node"), _NODES),
    "save_freq": "checkpoint.every",
    "test_freq": "eval.every",
    "teacher_models": _TEACHER,
    "teacher_key": "route.by",
    "critic_warmup": "critic.warmup_steps",
    "reward_model.path": "reward.models: {NAME: {model: PATH}}",
    "prompt_key": "tasks.NAME.prompt",
    "rollout.name": "rollout.engine",
    "resume_mode": "the option --resume of `practicum train`",
    "use_policy_gradient": "distill.apply_as: advantage",
    "use_task_rewards": "reward.weight: 0 for distillation alone, 1 to add the rewards",
    # prime-rl
    "rollouts_per_example": "rollout.samples",
    "inference": "rollout.engine: vllm, and rollout.vllm for its settings",
    "max_async_level": "rollout.lag",
    "ckpt.interval": "checkpoint.every",
    "max_off_policy_steps": "rollout.lag: rollouts are exactly that many steps old",
}
"""A key's last word or words, and what to write instead; VALUE stands for the value that was found."""

OTHER_VALUES = {
    "algorithm.loss": {
        "dapo": "algorithm: {loss: ppo_clip, aggregation: token_mean, clip_high: 0.28}; refills: 4 replaces "
        "groups with equal rewards",
        "bnpo": "algorithm: {loss: ppo_clip, aggregation: token_mean}; micro-batches don't change the result",
        "grpo": "algorithm: {advantage: grpo, loss: ppo_clip, aggregation: seq_mean_token_mean}",
        "dr_grpo": "algorithm: {advantage: dr_grpo, loss: ppo_clip, aggregation: seq_mean_token_sum}",
        **dict.fromkeys(("ppo", "vanilla", "clip"), "algorithm: {loss: ppo_clip}"),
        **{name: f"algorithm: {{loss: {name}}}" for name in ("cispo", "gspo")},
    },
    "algorithm.advantage": {
        "dapo": "algorithm: {advantage: grpo, clip_high: 0.28}; refills: 4 resamples equal groups",
        "reinforce_plus_plus": "algorithm: {advantage: reinforce_pp}",
        "reinforce_plus_plus_baseline": "algorithm: {advantage: reinforce_pp_baseline}",
        "ppo": "algorithm: {advantage: gae}; add critic: {}",
        **{name: f"algorithm: {{advantage: {name}}}" for name in ("grpo", "rloo", "remax")},
        "gae": "algorithm: {advantage: gae}; add critic: {}",
    },
    "algorithm.aggregation": {
        name.replace("_", "-"): f"algorithm: {{aggregation: {name}}}"
        for name in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
    },
    "algorithm.kl.estimator": {
        "kl": "algorithm: {kl: {place: reward, estimator: k1}}; in a loss use k2 or k3, not k1",
        "mse": "algorithm: {kl: {place: loss, estimator: k2}}",
        "low_var_kl": "algorithm: {kl: {place: loss, estimator: k3}}",
    },
    "rollout.engine": {
        "hf": "rollout: {engine: torch}",
        "sglang": "rollout: {engine: vllm}; SGLang is not supported",
    },
}
"""Values by our key, for that key and for the other trainers' keys in `_VALUE_KEYS`; before ";" is YAML."""
_VALUE_KEYS = {
    "loss_type": "algorithm.loss",
    "loss_mode": "algorithm.loss",
    "adv_estimator": "algorithm.advantage",
    "loss_agg_mode": "algorithm.aggregation",
    "kl_loss_type": "algorithm.kl.estimator",
}


def equivalent_key(key: str, value: Any, ours: Mapping[str, Sequence[str]]) -> str | None:
    """Return what to write for another trainer's key, or for each known key in a section of it, or None.

    `ours` are the keys of a recipe by their last word, which sections of other trainers have too.
    """
    if text := _equivalent(key, value):
        return f"use {text}"
    inner = {name: _equivalent(name, leaf) for name, leaf in _leaves(key, value)}
    if any(inner.values()):
        own = {name: " or ".join(ours.get(name.rpartition(".")[2], ())) for name in inner}
        inner = {name: text or own[name] for name, text in inner.items()}
    return "\n    ".join(f"{name}: use {text}" for name, text in inner.items() if text) or None


def equivalent_value(key: str, value: Any) -> str | None:
    """Return what to write for another trainer's value of one of our keys, or None."""
    text = OTHER_VALUES.get(key, {}).get(str(value))
    return None if text is None else f"use {text}"


def _equivalent(key: str, value: Any) -> str | None:
    word = key.rpartition(".")[2]
    if word in _VALUE_KEYS:
        ours = _VALUE_KEYS[word]
        return OTHER_VALUES[ours].get(str(value), ours)
    words = key.split(".")
    endings = (".".join(words[i:]) for i in range(len(words)))
    text = next((OTHER_KEYS[ending] for ending in endings if ending in OTHER_KEYS), None)
    return text and text.replace("VALUE", json.dumps(value, default=str))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and key.rpartition(".")[2] not in OTHER_KEYS:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value
