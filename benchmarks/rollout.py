"""Rollout tokens/s: practicum's torch engine, transformers `generate`, its continuous batching.

Each gets the same model and the same prompts: 32 prompts of 16 to 24 tokens, 8 samples of each,
at most 48 new tokens, temperature 1, nothing cut. Counted are the tokens up to and with the end
token, never padding.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks import harness, plots
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import examples, model_folder

PROMPTS, SAMPLES, MAX_NEW = 32, 8, 48
DIGITS = (10, 18)
ROUNDS = 5
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


def torch_engine(channel: Channel) -> None:
    """practicum: all 256 requests at once, as a training step makes them."""
    from practicum.models.load import ready
    from practicum.rollout.protocol import Counter, Sampling
    from practicum.rollout.torch_engine import TorchEngine

    model, tokenizer = load()
    model = ready(model, torch.device("cpu"))
    context = model.config.max_position_embeddings
    engine = TorchEngine(model, slots=PROMPTS * SAMPLES, context=context)
    sampling = Sampling(max_new_tokens=MAX_NEW, stop=frozenset([tokenizer.eos_token_id]))

    async def sample(turn: int, prompts: list[list[int]]) -> list[Any]:
        wanted = [
            engine.generate(ids, sampling, Counter(seed=turn, prompt=i, session=session))
            for i, ids in enumerate(prompts)
            for session in range(SAMPLES)
        ]
        return await asyncio.gather(*wanted)

    def run(turn: int) -> Measured:
        prompts = prompts_of(turn, tokenizer)
        began = time.perf_counter()
        found = asyncio.run(sample(turn, prompts))
        seconds = time.perf_counter() - began
        return _measured(seconds, [len(generation.tokens) for generation in found])

    channel.serve(run)
    engine.close()


def generate(channel: Channel) -> None:
    """transformers' `generate`: one batch of 256 left-padded rows."""
    model, tokenizer = load()
    config = _generation_config(tokenizer)

    def run(turn: int) -> Measured:
        torch.manual_seed(turn)
        rows = [ids for ids in prompts_of(turn, tokenizer) for _ in range(SAMPLES)]
        began = time.perf_counter()
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        ids_BT = model.generate(**batch, generation_config=config)
        response_BT = ids_BT[:, batch["input_ids"].shape[1] :]
        ended_BT = (response_BT == tokenizer.eos_token_id).cumsum(1)
        lengths = (ended_BT == 0).sum(1) + (ended_BT > 0).any(1)
        seconds = time.perf_counter() - began
        return _measured(seconds, lengths.tolist())

    channel.serve(run)


def continuous_batching(channel: Channel) -> None:
    """transformers' `generate_batch`: samples forked from their prompt, its memory kept for reuse."""
    from transformers.generation import ContinuousBatchingConfig

    model, tokenizer = load()
    config = _generation_config(tokenizer, num_return_sequences=SAMPLES)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=1024)

    def run(turn: int) -> Measured:
        torch.manual_seed(turn)
        prompts = prompts_of(turn, tokenizer)
        began = time.perf_counter()
        found = model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - began
        lengths = [len(output.generated_tokens) for output in found.values()]
        return _measured(seconds, lengths)

    channel.serve(run)


def _generation_config(tokenizer: Any, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )


def _measured(seconds: float, lengths: list[int]) -> Measured:
    assert len(lengths) == PROMPTS * SAMPLES, f"{len(lengths)} answers came back"
    tokens = sum(lengths)
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def main() -> None:
    """Race at one and at two threads, and write the results."""
    model_folder()
    functions = (torch_engine, generate, continuous_batching)
    found: dict[str, Any] = {}
    for threads in (1, 2):
        print(f"rollout, {threads} thread(s)")
        contenders = [
            Contender(name, f"benchmarks.rollout:{function.__name__}", threads=threads)
            for name, function in zip(CONTENDERS, functions, strict=True)
        ]
        found[str(threads)] = harness.race(contenders, ROUNDS)
    harness.write_results("rollout", {"settings": settings(), "threads": found})
    plots.bars(found, "tokens_per_second", "generated tokens per second", "rollout")


def settings() -> dict[str, Any]:
    """What was compared."""
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_new_tokens": MAX_NEW,
        "digits": DIGITS,
        "rounds": ROUNDS,
    }


if __name__ == "__main__":
    main()
