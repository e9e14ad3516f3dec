"""GRPO in one file: a tiny model is made, shown a task, and then learns it from rewards alone.

Read it top to bottom. Every part is practicum's own, used directly; what the trainer puts around them is left out, so
that the loop can be seen:
- the data plane, the plan and the roles: one process with one batch at a time can hold its columns in variables;
- checkpoints, resuming, the run folder and trackers: the run takes a minute and prints its numbers;
- evaluation on held-out prompts: the reward of prompts that were never seen before is close to it, since a built-in
  task makes new ones without end;
- the checks (weight versions, logprob gap, masks, groups): `gap` below is the one number worth a look;
- critic, reference policy, KL, several optimizer steps on a batch: GRPO does without them.
`practicum train` has all of it; `src/practicum/trainer/step.py` is this loop with its stages named.

    python examples/one_file.py --steps 40
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch

from practicum.algorithms.advantages.registry import ADVANTAGES
from practicum.algorithms.advantages.types import AdvantageInputs
from practicum.dataplane.ragged import Ragged
from practicum.learning.batch import UpdateBatch
from practicum.learning.learner import Learner
from practicum.models.load import load_model, load_tokenizer, stop_ids
from practicum.recipe.schema import Algorithm, MakeModel, Model, Task, Train
from practicum.rollout.protocol import Counter, Generation, Sampling
from practicum.rollout.torch_engine import TorchEngine
from practicum.runtime.events import run_async
from practicum.tasks.builtin import TASKS
from practicum.tasks.prompts import Prompt, demonstration, encode_prompt
from practicum.tasks.stream import make_stream

SEED = 1
PROMPTS, SAMPLES = 16, 8  # a batch of GRPO: groups, and answers in a group
CONTEXT, MAX_NEW_TOKENS = 32, 10

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--warmup", type=int, default=120, help="supervised steps")
parser.add_argument("--steps", type=int, default=40, help="GRPO steps")
args = parser.parse_args()
torch.set_num_threads(1)  # a model this small is faster without a second thread

# ---- The task. A stream gives prompt number n as a function of the seed and n; the kind checks answers. ----

KIND = "sort"
stream = make_stream({KIND: Task(kind=KIND, options={"length": [4, 8]})}, SEED)
check = TASKS[KIND].check

# ---- The model: random weights and a character tokenizer, made on the spot. ----

spec = Model(make=MakeModel(hidden=96, layers=3, heads=4, kv_heads=2, head_dim=24, context=CONTEXT), device="cpu")
tokenizer = load_tokenizer(spec)
model = load_model(spec, SEED)
stop = stop_ids(model, tokenizer)
(end_id,) = stop


def encode(prompt: Prompt) -> torch.Tensor:
    """A prompt as tokens."""
    return torch.tensor(encode_prompt(prompt, tokenizer, chat=False, system=None))


def everything(column: Ragged) -> Ragged:
    """A mask that is true everywhere: each response token was sampled (or is to be imitated)."""
    return Ragged.packed(torch.ones(sum(column.lengths), dtype=torch.bool), column.lengths)


# ---- Warm-up: supervised on demonstrations, stopped while the model still errs. Rewards of a model that never ----
# ---- succeeds are all 0, and GRPO learns from differences only.                                               ----

imitation = Train(steps=max(args.warmup, 1), lr=3e-3, warmup_steps=min(10, args.warmup), schedule="cosine", final_lr=3e-4)
pupil = Learner(model, imitation, Algorithm(loss="supervised", advantage="none"))
for step in range(args.warmup):
    pupil.step = step  # where the learning-rate schedule is
    prompts = stream.take(64)
    shown = [[*tokenizer.encode(demonstration(p), add_special_tokens=False), end_id] for p in prompts]
    responses = Ragged.from_rows([torch.tensor(ids) for ids in shown])
    metrics = pupil.update(
        UpdateBatch(
            prompt_ids=Ragged.from_rows([encode(p) for p in prompts]),
            response_ids=responses,
            response_mask=everything(responses),
            sessions=range(len(prompts)),
        )
    )
    if (step + 1) % 20 == 0:
        print(f"warm-up {step + 1:3d}  loss {metrics['loss']:.3f}")

# ---- GRPO. The engine samples with the learner's own tensors: there is one copy of the weights. ----

engine = TorchEngine(model, slots=PROMPTS * SAMPLES, context=CONTEXT)
student = Learner(model, Train(steps=args.steps, lr=3e-4), Algorithm(advantage="grpo", loss="ppo_clip"))
sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop=stop)


async def practise(prompts: list[Prompt]) -> list[Generation]:
    """SAMPLES answers to each prompt, group after group; the engine batches them and computes a prompt once."""
    sessions = [(p, encode(p).tolist(), i) for p in prompts for i in range(SAMPLES)]
    return await asyncio.gather(
        *(engine.generate(ids, sampling, Counter(SEED, p.uid, session=i)) for p, ids, i in sessions)
    )


def judge(prompt: Prompt, generation: Generation) -> float:
    """1 for the right answer, else 0."""
    return check(str(tokenizer.decode(generation.tokens, skip_special_tokens=True)), prompt.answer, prompt.row)


rewards_by_step: list[float] = []
for step in range(args.steps):
    began = time.perf_counter()
    student.step = step
    prompts = stream.take(PROMPTS)

    generations = run_async(practise(prompts), timeout=120, owner="rollout")
    asked = [p for p in prompts for _ in range(SAMPLES)]
    rewards_S = torch.tensor([judge(p, g) for p, g in zip(asked, generations, strict=True)])

    # Packed: `_N` is one entry per response token of the batch, `_S` one per session. A session's reward stands at
    # its last token; `session_N` says whose a token is, `group_S` which prompt a session answers.
    responses = Ragged.from_rows([g.tokens for g in generations])
    mask = everything(responses)
    lengths_S = torch.tensor(responses.lengths)
    token_rewards_N = torch.zeros(int(lengths_S.sum()))
    token_rewards_N[lengths_S.cumsum(0) - 1] = rewards_S
    sessions_S = torch.arange(len(generations))
    advantages = ADVANTAGES["grpo"](
        AdvantageInputs(
            token_rewards_N=token_rewards_N,
            mask_N=mask.values,
            session_N=sessions_S.repeat_interleave(lengths_S),
            group_S=sessions_S // SAMPLES,
        )
    )

    # One optimizer step on the batch. Without old logprobs the ratio's denominator is the student itself, which is
    # exact as long as a batch gets one step. The engine's plain logprobs only serve to compare (`gap`).
    metrics = student.update(
        UpdateBatch(
            prompt_ids=Ragged.from_rows([encode(p) for p in asked]),
            response_ids=responses,
            response_mask=mask,
            sessions=sessions_S.tolist(),
            advantages=Ragged.packed(advantages.advantages_N, responses.lengths),
            plain_logprobs=Ragged.from_rows([g.plain_logprobs for g in generations]),
        )
    )
    # The tensors are shared, so nothing is copied; what the engine computed with the old weights is forgotten.
    engine.load_weights(student.named_weights(), student.version)

    rewards_by_step.append(float(rewards_S.mean()))
    print(
        f"step {step + 1:3d}  reward {rewards_by_step[-1]:.3f}  flat groups {advantages.stats['flat_groups']:2.0f}  "
        f"entropy {metrics['entropy']:.3f}  gap {metrics['gap_max']:.0e}  {time.perf_counter() - began:.2f} s"
    )

engine.close()
if rewards_by_step:
    edge = min(5, len(rewards_by_step))
    first, last = statistics.fmean(rewards_by_step[:edge]), statistics.fmean(rewards_by_step[-edge:])
    print(f"mean reward of the first {edge} steps {first:.3f}, of the last {edge} {last:.3f}")
