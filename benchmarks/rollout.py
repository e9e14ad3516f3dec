"""Rollout tokens/s: practicum's torch engine, transformers `generate`, its continuous batching.

Each gets the same model and the same prompts: 32 prompts of 16 to 24 tokens, 8 samples of each,
at most 48 new tokens, temperature 1, nothing cut. Counted are the tokens up to and with the end
token, never padding.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks import harness, plots
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import examples, model_folder
from practicum.concurrency.event_loop import run_async
from practicum.engines.protocol import GenerateRequest

ROLLOUT_S = 600.0
PROMPTS, SAMPLES = 32, 8
DIGITS = (10, 18)
SETTINGS = {
    "1 thread": (1, 48),
    "2 threads": (2, 48),
    "1 thread, cap 19": (1, DIGITS[1] + 1),
}
"""Threads and the most new tokens. A cap of the longest right answer and its end token takes away
the few answers that never end, for which `generate` decodes all 256 rows to the last."""
ROUNDS = {1: 4, 2: 3}
"""By threads."""
CONTENDERS = ("practicum", "transformers generate", "transformers continuous batching")


def load() -> tuple[Any, Any]:
    """The model and its tokenizer."""
    folder = model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def prompts_of(turn: int, tokenizer: Any) -> list[list[int]]:
    """The round's prompts as token ids."""
    drawn = examples(1, turn * PROMPTS, PROMPTS, DIGITS)
    return [tokenizer.encode(example.prompt) for example in drawn]


def torch_engine(channel: Channel, max_new: int) -> None:
    """practicum: all 256 requests at once, as a training step makes them."""
    from practicum.engines.protocol import Counter, Sampling
    from practicum.engines.torch.torch_engine import TorchEngine
    from practicum.models.load_model import ready

    model, tokenizer = load()
    model = ready(model, torch.device("cpu"))
    context = model.config.max_position_embeddings
    engine = TorchEngine(model, slots=PROMPTS * SAMPLES, context=context)
    sampling = Sampling(max_new_tokens=max_new, stop=frozenset([tokenizer.eos_token_id]))

    async def sample(turn: int, prompts: list[list[int]]) -> list[Any]:
        wanted = [
            engine.generate(GenerateRequest(ids, sampling, Counter(seed=turn, prompt=i, session=session)))
            for i, ids in enumerate(prompts)
            for session in range(SAMPLES)
        ]
        return await asyncio.gather(*wanted)

    def run(turn: int) -> Measured:
        prompts = prompts_of(turn, tokenizer)
        watch = Stopwatch()
        found = run_async(sample(turn, prompts), timeout=ROLLOUT_S, owner="rollout")
        spent = watch.read()
        return _measured(spent, [len(generation.tokens) for generation in found])

    channel.serve(run)
    engine.close()


def generate(channel: Channel, max_new: int) -> None:
    """transformers' `generate`: one batch of 256 left-padded rows."""
    model, tokenizer = load()
    config = _generation_config(tokenizer, max_new)

    def run(turn: int) -> Measured:
        torch.manual_seed(turn)
        rows = [ids for ids in prompts_of(turn, tokenizer) for _ in range(SAMPLES)]
        watch = Stopwatch()
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        ids_BT = model.generate(**batch, generation_config=config)
        response_BT = ids_BT[:, batch["input_ids"].shape[1] :]
        ended_BT = (response_BT == tokenizer.eos_token_id).cumsum(1)
        lengths = (ended_BT == 0).sum(1) + (ended_BT > 0).any(1)
        spent = watch.read()
        return _measured(spent, lengths.tolist())

    channel.serve(run)


def continuous_batching(channel: Channel, max_new: int) -> None:
    """transformers' `generate_batch`: samples forked from their prompt, its memory kept for reuse."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model, tokenizer = load()
    config = _generation_config(tokenizer, max_new, num_return_sequences=SAMPLES)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=1024)

    def run(turn: int) -> Measured:
        torch.manual_seed(turn)
        prompts = prompts_of(turn, tokenizer)
        watch = Stopwatch()
        found = model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        spent = watch.read()
        lengths = [len(output.generated_tokens) for output in found.values()]
        return _measured(spent, lengths)

    channel.serve(run)


def _generation_config(tokenizer: Any, max_new: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )


def _measured(spent: Measured, lengths: list[int]) -> Measured:
    assert len(lengths) == PROMPTS * SAMPLES, f"{len(lengths)} answers came back"
    tokens = sum(lengths)
    return {**spent, "tokens": tokens, "tokens_per_second": tokens / spent["seconds"]}


def main() -> None:
    """Race at one and at two threads, and once more with a tight cap, and write the results."""
    model_folder()
    functions = (torch_engine, generate, continuous_batching)
    found: dict[str, Any] = {}
    for title, (threads, max_new) in SETTINGS.items():
        print(f"rollout, {title}")
        contenders = [
            Contender(name, f"benchmarks.rollout:{function.__name__}", {"max_new": max_new}, threads)
            for name, function in zip(CONTENDERS, functions, strict=True)
        ]
        found[title] = harness.race(contenders, ROUNDS[threads])
    settings = {"prompts": PROMPTS, "samples": SAMPLES, "digits": DIGITS, "rounds": ROUNDS}
    settings |= {"threads_and_max_new_tokens": SETTINGS}
    harness.write_results("rollout", {"settings": settings, "raced": found})
    plots.bars(found, "tokens_per_second", "generated tokens per second", "rollout")


if __name__ == "__main__":
    main()
