"""The same cases on one rank and on two: what they learn, measure and write."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.dataplane.ragged import Ragged
from practicum.errors import CheckError
from practicum.learning.learner import Learner
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.optimizer import OptimizerStepper
from practicum.learning.parallel import Parallel, free_port, whole
from practicum.learning.update_batch import BatchFacts, CriticBatch, UpdateBatch
from practicum.learning.value_learner import ValueLearner
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.algorithm_sections import Algorithm, Kl
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Train

from ..models.families import tiny_family
from .distilled import take_taught, taught, teaching
from .reference import VOCAB, adapted, random_batch, take, tiny, with_shared_beginnings

WORLD = 2
UPDATES = 2
TRAIN = Train(
    lr=0.01,
    optimizer="tests.learning.optimizers:steady",
    weight_decay=0.1,
    max_grad_norm=0.5,
    microbatch_tokens=40,
)


@dataclass
class Found:
    """What a case came to: numbers that must not depend on the number of ranks."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, dict[Any, Tensor]] = field(default_factory=dict)
    """Response columns by the row; each rank has some rows."""
    refused: list[str] = field(default_factory=list)

    def keep(self, model: nn.Module, stepper: OptimizerStepper) -> None:
        """All weights and moments, gathered."""
        for name, p in model.named_parameters():
            self.tensors[name] = whole(p.detach()).clone()
            if not p.requires_grad:
                assert p.grad is None
                continue
            for moment in ("exp_avg", "exp_avg_sq"):
                self.tensors[f"{name}.{moment}"] = whole(stepper.optimizer.state[p][moment]).clone()


Case = Callable[[Parallel | None, Path], Found]
CASES: dict[str, Case] = {}
SINGLE: set[str] = set()
"""Cases in single precision."""


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def uneven(rows: int) -> list[list[int]]:
    """Most rows on the first rank."""
    return [list(range(rows - 2)), list(range(rows - 2, rows))]


def none_on_one(rows: int) -> list[list[int]]:
    return [[], list(range(rows))]


def in_turn(rows: int) -> list[list[int]]:
    """Rows of one session on both ranks."""
    return [list(range(rank, rows, WORLD)) for rank in range(WORLD)]


def by_session(sessions: Sequence[int]) -> list[list[int]]:
    """Whole sessions on each rank."""
    names = sorted(set(sessions))
    return [[i for i, s in enumerate(sessions) if names.index(s) % WORLD == rank] for rank in range(WORLD)]


def on_rank(batch: UpdateBatch, rows: list[list[int]], parallel: Parallel | None) -> UpdateBatch:
    """This rank's rows, with what every rank knows of all."""
    if parallel is None:
        return batch
    picked = (take if batch.teachers is None else take_taught)(batch, rows[parallel.rank])
    everywhere = BatchFacts(
        sessions=batch.sessions,
        sampled_tokens=[int(mask.sum()) for mask in batch.response_mask.rows],
        session_tokens=batch.session_tokens or session_tokens(batch),
        teachers=[0] * len(batch.sessions) if batch.teachers is None else batch.teachers.teacher,
        weights=[int(mask.sum()) for mask in batch.response_mask.rows],
    )
    return replace(picked, whole=everywhere)


def learn(
    parallel: Parallel | None,
    model: PreTrainedModel,
    algorithm: Algorithm,
    batches: Sequence[UpdateBatch],
    split: Callable[[UpdateBatch], list[list[int]]],
    *,
    train: Train = TRAIN,
    **options: Any,
) -> tuple[Learner, Found]:
    """Updates one after the other."""
    learner, found = Learner(model, train, algorithm, parallel=parallel, **options), Found()
    for batch in batches:
        mine = on_rank(batch, split(batch), parallel)
        found.metrics.append(learner.update(mine))
        found.metrics.append({f"{k}.{n}": x for k, v in learner.by_group.sums.items() for n, x in v.items()})
    found.keep(learner.model, learner.stepper)
    return learner, found


def batches(updates: int = UPDATES, **options: Any) -> list[UpdateBatch]:
    return [with_shared_beginnings(random_batch(seed, **options)) for seed in range(updates)]


def unshared_batches() -> list[UpdateBatch]:
    """Rows that have nothing in common, so that loads of experts count each token once on any rank."""
    found = []
    for seed in range(2):
        batch = random_batch(seed, groups=8, samples=1)
        rows = [row.clone() for row in batch.prompt_ids.rows]
        assert len(rows) <= VOCAB
        for i, row in enumerate(rows):
            row[0] = i
        found.append(replace(batch, prompt_ids=Ragged.from_rows(rows)))
    return found


@case
def ragged_rows(parallel: Parallel | None, folder: Path) -> Found:
    """Tied embeddings, every penalty, sessions of which the mini-batch has only a part."""
    algorithm = Algorithm(
        aggregation="seq_mean_token_mean", entropy=0.1, kl=Kl(place="loss", coefficient=0.1)
    )
    # As if each session had five more tokens elsewhere.
    cut = [replace(b, session_tokens=[n + 5 for n in session_tokens(b)]) for b in batches()]
    learner, found = learn(
        parallel, tiny(), algorithm, cut, lambda b: uneven(len(b.sessions)), temperature=0.7
    )
    batch = random_batch(9)
    rows = (
        list(range(len(batch.sessions))) if parallel is None else in_turn(len(batch.sessions))[parallel.rank]
    )
    mine = take(batch, rows)
    columns = learner.scorer.logprobs(mine.prompt_ids, mine.response_ids, temperature=0.7)
    found.columns["logprobs"] = dict(zip(rows, columns.rows, strict=True))
    found.tensors["fingerprint"] = learner.fingerprint()
    found.tensors |= {f"sent.{name}": weight.clone() for name, weight in learner.named_weights()}
    learner.save(folder / "student")
    learner.export(folder / "export", make_tokenizer())
    return found


def session_tokens(batch: UpdateBatch) -> list[int]:
    """Sampled tokens of each row's session."""
    tokens: dict[int, int] = {}
    for session, mask in zip(batch.sessions, batch.response_mask.rows, strict=True):
        tokens[session] = tokens.get(session, 0) + int(mask.sum())
    return [tokens[session] for session in batch.sessions]


@case
def no_row_on_one(parallel: Parallel | None, folder: Path) -> Found:
    given = batches(2, flat_groups=1)
    return learn(parallel, tiny("llama"), Algorithm(), given, lambda b: none_on_one(len(b.sessions)))[1]


@case
def split_sessions(parallel: Parallel | None, folder: Path) -> Found:
    """Some without advantage; weights recomputed in the backward pass."""
    given, train = batches(2, flat_groups=1), TRAIN.model_copy(update={"gradient_checkpointing": True})
    split = lambda b: in_turn(len(b.sessions))  # noqa: E731
    return learn(parallel, tiny("gpt2"), Algorithm(loss="cispo"), given, split, train=train)[1]


@case
def whole_sessions(parallel: Parallel | None, folder: Path) -> Found:
    algorithm = Algorithm(loss="gspo", aggregation="seq_mean_token_mean")
    return learn(parallel, tiny(), algorithm, batches(2), lambda b: by_session(b.sessions))[1]


@case
def teachers_with_shares(parallel: Parallel | None, folder: Path) -> Found:
    given = [taught(batch) for batch in batches(2, groups=4)]
    how = teaching("reverse_kl", "top_k", shares={0: 0.2, 1: 0.8})
    split = lambda b: uneven(len(b.sessions))  # noqa: E731
    learner, found = learn(
        parallel, tiny(), Algorithm(aggregation="seq_mean_token_sum"), given, split, teaching=how
    )
    batch = given[0]
    assert batch.groups is not None
    learner.update(on_rank(batch, split(batch), parallel), groups=(0, 1))
    assert learner.shares is not None
    numbers = [
        *learner.shares.shares,
        *learner.shares.rest.values(),
        *(x for row in learner.shares.gram for x in row),
    ]
    found.metrics.append({str(i): number for i, number in enumerate(numbers)})
    return found


@case
def experts(parallel: Parallel | None, folder: Path) -> Found:
    given = unshared_batches()
    split = lambda b: uneven(len(b.sessions))  # noqa: E731
    return learn(parallel, tiny("qwen3_moe"), Algorithm(loss="supervised", advantage="none"), given, split)[1]


@case
def pictures_on_one(parallel: Parallel | None, folder: Path) -> Found:
    from .test_vision import ROWS, seeing, vision_batch

    split = lambda b: [[i for i, r in enumerate(ROWS) if (r[2] is None) == rank] for rank in range(WORLD)]  # noqa: E731
    algorithm = Algorithm(loss="ppo_clip")
    return learn(parallel, seeing(), algorithm, [vision_batch()] * 2, split)[1]


@case
def single_precision(parallel: Parallel | None, folder: Path) -> Found:
    model, split = tiny(dtype=torch.float32), lambda b: uneven(len(b.sessions))
    return learn(parallel, model, Algorithm(), batches(), split)[1]


SINGLE.add("single_precision")


@case
def state_layers(parallel: Parallel | None, folder: Path) -> Found:
    """Every other layer carries a state; gradient checkpointing computes it again."""
    model = tiny_family("qwen3_5_text", vocab_size=VOCAB)
    train = TRAIN.model_copy(update={"gradient_checkpointing": True})
    return learn(parallel, model, Algorithm(), batches(1), lambda b: uneven(len(b.sessions)), train=train)[1]


SINGLE.add("state_layers")


@case
def critic(parallel: Parallel | None, folder: Path) -> Found:
    found, recipe = Found(), CriticRecipe(lr=0.01)
    learner = ValueLearner(tiny(), TRAIN, recipe, parallel=parallel)
    for batch in batches():
        assert batch.advantages is not None
        assert batch.old_logprobs is not None
        rows = list(range(len(batch.sessions)))
        if parallel is not None:
            rows = uneven(len(rows))[parallel.rank]
        mine = take(batch, rows)
        assert mine.advantages is not None
        values = learner.values(mine.prompt_ids, mine.response_ids)
        found.columns[f"values {len(found.metrics)}"] = dict(zip(rows, values.rows, strict=True))
        tokens = int(batch.response_mask.values.sum())
        update = CriticBatch(
            mine.prompt_ids,
            mine.response_ids,
            mine.response_mask,
            values,
            mine.advantages,
            whole_tokens=None if parallel is None else tokens,
        )
        found.metrics.append(learner.update(update))
    found.keep(learner.model, learner.stepper)
    learner.save(folder / "critic")
    return found


@case
def adapter(parallel: Parallel | None, folder: Path) -> Found:
    """Beside linear layers and experts; with a critic on the same base, whose shards are its own."""
    model, split = adapted("qwen3_moe"), lambda b: uneven(len(b.sessions))
    critic = ValueLearner(model, TRAIN, CriticRecipe(lr=0.01), parallel=parallel)
    learner, found = learn(parallel, model, Algorithm(), unshared_batches(), split)
    found.tensors["fingerprint"] = learner.fingerprint()
    found.tensors["reference"] = LogprobScorer(learner.trunk, adapter=False).fingerprint()
    found.tensors |= {f"sent.{name}": weight.clone() for name, weight in learner.named_weights()}
    found.tensors |= {f"plain.{name}": weight.clone() for name, weight in learner.plain_weights()}
    found.tensors |= {f"critic.{name}": whole(p.detach()) for name, p in critic.model.named_parameters()}
    learner.save(folder / "student")
    learner.load(folder / "student")
    learner.export(folder / "export", make_tokenizer())
    return found


@case
def refusals(parallel: Parallel | None, folder: Path) -> Found:
    """A loss that is not finite on one rank; a check that looks at metrics."""
    learner, found = Learner(tiny(), TRAIN, Algorithm(), parallel=parallel), Found()
    batch = random_batch(0)
    split = uneven(len(batch.sessions))
    assert batch.advantages is not None
    broken_M = batch.advantages.values.clone()
    broken_M[batch.response_mask.values.nonzero()[0]] = torch.nan
    spoilt = replace(batch, advantages=Ragged.packed(broken_M, batch.response_ids.lengths))
    for given, check in ((spoilt, None), (batch, _refuse)):
        try:
            learner.update(on_rank(given, split, parallel), before_step=check)
        except CheckError as error:
            found.refused.append(str(error))
    found.metrics.append(learner.update(on_rank(batch, split, parallel)))
    found.keep(learner.model, learner.stepper)
    return found


def _refuse(metrics: dict[str, float]) -> None:
    raise CheckError(f"refused with {metrics['tokens']:g} tokens")


def _rank(rank: int, port: int, folder: Path, run: Callable[[Parallel, Path], Any]) -> None:
    torch.set_num_threads(1)
    try:
        parallel = Parallel.join(rank, WORLD, "127.0.0.1", port, timeout_s=120)
        found = run(parallel, folder)
        torch.save(found, folder / f"rank-{rank}.pt")
        parallel.close()
    except BaseException:
        (folder / f"rank-{rank}.txt").write_text(traceback.format_exc())
        raise


def on_ranks(folder: Path, run: Callable[[Parallel, Path], Any]) -> list[Any]:
    """What a function gives on each of two ranks, in processes of their own."""
    port, context = free_port(), mp.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, port, folder, run)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    said = "\n".join(path.read_text() for path in sorted(folder.glob("rank-*.txt")))
    assert codes == [0] * WORLD, f"ranks ended with {codes}\n{said}"
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(WORLD)]
