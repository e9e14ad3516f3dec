"""Compute the sizes of a recipe: sessions per step, optimizer steps, totals."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_LOGITS = 2**25
"""Logits in memory at a time: small enough for memory, large enough for an efficient large head."""
CPU_MICROBATCH_TOKENS = 2048
"""On a CPU, larger micro-batches are slower: activations leave the caches (measured, 250 to 4,000 tokens)."""

KV_POSITIONS, KV_SPARE = 64, 1.25
"""Initial positions per slot of the torch engine's KV memory, and its growth factor. Waking zero-fills the
memory, so a larger reserve would cost more than growing does."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a step. `samples` is 1 for SFT examples, `baselines` counts the greedy sessions."""

    supervised: bool
    steps: int
    prompts: int
    samples: int
    baselines: int
    epochs: int
    minibatches: int
    minibatch_size: int | None
    refills: int

    @property
    def sessions(self) -> int:
        """Number of sessions (examples, if supervised) that a step trains on."""
        return self.prompts * self.samples

    @property
    def optimizer_steps(self) -> int:
        return self.epochs * self.minibatches

    def lines(self) -> list[str]:
        """Describe the sizes for people."""
        what, batch = "example", f"{_many(self.prompts, 'example')} per step"
        if not self.supervised:
            what = "session"
            product = f"{_many(self.prompts, 'prompt')} × {_many(self.samples, 'sample')}"
            batch = f"{product} = {_many(self.sessions, 'session')} per step"
            if self.baselines:
                batch += f", and {self.baselines} greedy ones as baselines"
            if self.refills:
                batch += f", refilled up to {_many(self.refills, 'time')}"
        if self.minibatch_size is not None:
            each = f"optimizer steps on up to {_many(self.minibatch_size, 'row')} each"
            return [batch, f"{_many(self.epochs, 'epoch')} of {each}, as many as the batch's rows need"]
        passes = f"{_many(self.epochs, 'epoch')} × {_many(self.minibatches, 'minibatch')}"
        updates = _many(self.optimizer_steps, "optimizer step")
        return [
            batch,
            f"{passes} = {updates} per step, on {_many(self.sessions // self.minibatches, what)} each",
            f"{_many(self.steps, 'step')}: {_many(self.steps * self.sessions, what)} and "
            f"{_many(self.steps * self.optimizer_steps, 'optimizer step')} in all",
        ]


def _many(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number:,} {word if number == 1 else plural}"
