"""Memory of a learner rank while it loads a model: whole, then cut into shards; or its shards alone.

Two ranks at once, each its own process, from one file in float32. Counted is the most resident memory of a
rank until it has its shards, above what it had with all libraries imported. A forward pass comes later and
gathers one layer after the other, whichever way the shards came.
"""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import harness
from practicum.learning.parallel import Parallel, free_port
from practicum.models.load_model import load_model
from practicum.models.lora import text_layers
from practicum.models.weight_files import load_for_ranks
from practicum.processes.host_memory import peak_resident_memory, reset_peak
from practicum.recipe.schema.recipe import Model

RANKS, DTYPES = 2, ("float32", "bfloat16")
DEADLINE_S = 300.0


def make_model(folder: Path) -> int:
    """Save a random model; gives the number of its parameters."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def load(rank: int, port: int, folder: str, dtype: str, way: str, answers: Any) -> None:
    """One rank: join, load, tell the peak."""
    torch.set_num_threads(1)
    parallel = Parallel.join(rank, RANKS, "127.0.0.1", port, DEADLINE_S)
    spec = Model(path=folder, dtype=dtype, device="cpu")  # pyright: ignore[reportArgumentType]
    reset_peak()
    before = peak_resident_memory() or 0
    model, files = load_for_ranks(spec, 0, RANKS) if way == "shards" else (load_model(spec, 0), None)
    parallel.shard(model, [*text_layers(model).values()], device=torch.device("cpu"))
    if files is not None:
        assert not files.fill(model, rank, RANKS)
    answers.put({"bytes": float((peak_resident_memory() or 0) - before)})
    parallel.close()


def measure(folder: str, dtype: str, way: str) -> list[harness.Measured]:
    """What each rank took."""
    context, port = mp.get_context("spawn"), free_port()
    answers = context.Queue()
    ranks = [
        context.Process(target=load, args=(rank, port, folder, dtype, way, answers)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        return [answers.get(timeout=DEADLINE_S) for _ in ranks]
    finally:
        for process in ranks:
            process.join(timeout=30)
            process.kill()


def main() -> None:
    """Measure, print, write the numbers."""
    loaded: dict[str, dict[str, list[harness.Measured]]] = {}
    with TemporaryDirectory() as folder:
        # In a process of its own, whose memory is gone when the ranks are measured.
        with mp.get_context("spawn").Pool(1) as pool:
            parameters = pool.apply(make_model, [Path(folder)])
        for dtype in DTYPES:
            loaded[dtype] = {}
            for way in ("whole", "shards"):
                ranks = loaded[dtype][way] = measure(folder, dtype, way)
                most = max(rank["bytes"] for rank in ranks)
                told = f"{parameters / 1e6:.0f}M, {dtype}, {way}: {most / 1e6:,.0f} MB for a rank"
                print(f"  {told}", flush=True)
    harness.write_results("rank_memory", {"parameters": parameters, "ranks": RANKS, "loaded": loaded})


if __name__ == "__main__":
    main()
