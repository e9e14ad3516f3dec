"""GRPO in one file: a tiny model is made, shown a task a little, and then learns it from rewards alone.

    python examples/one_file.py --steps 50

Read it top to bottom. The parts are practicum's, used directly; what the trainer adds to them is left out:
- data plane, plan and roles: one process with one batch at a time can hold its columns in variables;
- checkpoints, run folder, trackers: the run is over in half a minute and prints its numbers;
- evaluation: the task makes new prompts without end, so the training reward is of prompts never seen before;
- the checks: `gap`, the largest difference between engine and learner logprobs, is printed instead;
- critic, reference policy, KL, several optimizer steps per batch: this algorithm does without them.
`practicum train` has all of it, and `src/practicum/trainer/step.py` is this loop with its stages named.

Expected: the reward rises from about 0.15 to about 0.7. Shapes: `_N` has an entry for each response token of
a batch, `_S` one for each session (one answer to one prompt).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch

from practicum.algorithms.advantages import ADVANTAGES, AdvantageInputs
from practicum.concurrency.event_loop import run_async
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import Counter, GenerateRequest, Generation, Sampling
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.learning.learner import Learner
from practicum.learning.update_batch import UpdateBatch
from practicum.models.load_model import load_model, load_tokenizer, stop_ids
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import MakeModel, Model, Task, Train
from practicum.tasks.builtin import TASKS
from practicum.tasks.prompts import Prompt, demonstration, encode_prompt
from practicum.tasks.stream import make_stream

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--warmup", type=int, default=40, help="supervised steps")
parser.add_argument("--steps", type=int, default=50, help="GRPO steps")
args = parser.parse_args()

SEED = 1
PROMPTS, SAMPLES = 32, 8  # groups in a batch, and answers in a group
CONTEXT, MAX_NEW_TOKENS = 24, 8
torch.set_num_threads(1)  # a second thread costs a model of this size more than it gains

# 1. The task. Prompt number n of the stream is a function of the seed and n; a checker judges answers.
task = Task(kind="copy", options={"length": [3, 5], "letters": 8})
stream = make_stream({"copy": task}, SEED)
check = TASKS["copy"].check

# 2. The model: random weights and a character tokenizer, made on the spot.
make = MakeModel(hidden=96, layers=3, heads=4, context=CONTEXT)
spec = Model(random_init=make, device="cpu")
tokenizer = load_tokenizer(spec)
model = load_model(spec, SEED)
stop = stop_ids(model.generation_config, tokenizer)
(end_id,) = stop


def encode(prompt: Prompt) -> list[int]:
    """A prompt as tokens."""
    return encode_prompt(prompt, tokenizer, chat=False, system=None).ids


def columns(prompts: list[Prompt], responses: list[torch.Tensor]) -> tuple[Ragged, Ragged, Ragged]:
    """prompt_ids, response_ids and response_mask; no tool put tokens in, so the mask is true everywhere."""
    masks = [torch.ones_like(response, dtype=torch.bool) for response in responses]
    ids = [torch.tensor(encode(prompt)) for prompt in prompts]
    return Ragged.from_rows(ids), Ragged.from_rows(responses), Ragged.from_rows(masks)


# 3. Warm-up on demonstrations, stopped early. GRPO learns from differences between the answers to one prompt:
#    a model that never succeeds gives it none.
schedule = Train(steps=args.warmup, lr=3e-3, warmup_steps=10, schedule="cosine", final_lr=3e-4)
pupil = Learner(model, schedule, Algorithm(loss="supervised", advantage="none"))
for step in range(args.warmup):
    prompts = stream.take(64)
    answers = [tokenizer.encode(demonstration(p), add_special_tokens=False) for p in prompts]
    shown = columns(prompts, [torch.tensor([*answer, end_id]) for answer in answers])
    # The step is where the learning-rate schedule is.
    metrics = pupil.update(UpdateBatch(*shown, sessions=range(len(prompts))), step=step + 1)
    if (step + 1) % 10 == 0:
        print(f"warm-up {step + 1:3d}  loss {metrics['loss']:.3f}")

# 4. GRPO. Engine and learner hold one model object, so there is one copy of the weights.
engine = TorchEngine(model, slots=PROMPTS * SAMPLES, context=CONTEXT)
student = Learner(model, Train(steps=args.steps, lr=6e-4), Algorithm(advantage="grpo", loss="ppo_clip"))
sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop=stop)


async def practise(prompts: list[Prompt]) -> list[Generation]:
    """SAMPLES answers to each prompt, group by group; the engine computes each prompt once.

    A sample is a function of its counter, not of what else is in the batch.
    """
    asked = [(encode(p), Counter(SEED, p.uid, session=i)) for p in prompts for i in range(SAMPLES)]
    return await asyncio.gather(
        *(engine.generate(GenerateRequest(ids, sampling, counter)) for ids, counter in asked)
    )


def judge(prompt: Prompt, generation: Generation) -> float:
    """1 for the right answer, else 0."""
    text = str(tokenizer.decode(generation.tokens, skip_special_tokens=True))
    return check(text, prompt.answer, prompt.row)


rewards: list[float] = []
for step in range(args.steps):
    began = time.perf_counter()

    # Practise: 256 sessions, in groups of 8. Then judge each.
    prompts = stream.take(PROMPTS)
    generations = run_async(practise(prompts), timeout=120, owner="rollout")
    asked = [prompt for prompt in prompts for _ in range(SAMPLES)]
    reward_S = torch.tensor([judge(p, g) for p, g in zip(asked, generations, strict=True)])

    # Advantages. The reward stands at the last token of its session; session_N says whose a token is, group_S
    # which prompt a session answers.
    prompt_ids, response_ids, mask = columns(asked, [g.tokens for g in generations])
    session_S = torch.arange(len(generations))
    length_S = torch.tensor(response_ids.lengths)
    token_rewards_N = torch.zeros(int(length_S.sum()))
    token_rewards_N[length_S.cumsum(0) - 1] = reward_S
    inputs = AdvantageInputs(
        token_rewards_N=token_rewards_N,
        mask_N=mask.values,
        session_N=session_S.repeat_interleave(length_S),
        group_S=session_S // SAMPLES,
    )
    credit = ADVANTAGES["grpo"](inputs)

    # One optimizer step. Without old logprobs the ratio's denominator is the student itself, which is exact
    # for the first step on a batch. The engine's logprobs are there to be compared with the learner's.
    batch = UpdateBatch(
        prompt_ids,
        response_ids,
        mask,
        sessions=session_S.tolist(),
        advantages=Ragged.packed(credit.advantages_N, response_ids.lengths),
        plain_logprobs=Ragged.from_rows([g.plain_logprobs for g in generations]),
    )
    metrics = student.update(batch, step=step + 1)
    # The tensors are shared, so nothing is copied; the engine forgets what it computed with their old values.
    engine.load_weights(student.named_weights(), student.version)

    rewards.append(float(reward_S.mean()))
    print(
        f"step {step + 1:3d}  reward {rewards[-1]:.3f}  flat groups {credit.stats['flat_groups']:2.0f}  "
        f"entropy {metrics['entropy']:.3f}  gap {metrics['gap_max']:.0e}  {time.perf_counter() - began:.2f} s"
    )

engine.close()
if rewards:
    few = min(5, len(rewards))
    first, last = statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])
    print(f"mean reward: first {few} steps {first:.3f}, last {few} steps {last:.3f}")
