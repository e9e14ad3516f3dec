"""The loss with a weight for each token, against one that is computed row by row."""

from dataclasses import replace

import pytest
import torch

from practicum.dataplane.ragged import Ragged
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .reference import random_batch, tiny
from .updates import learn


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
@pytest.mark.parametrize("loss", ["supervised", "ppo_clip"])
@pytest.mark.parametrize("inserted", [0.0, 0.3])
def test_weighted_tokens_are_divided_by_their_weights(loss: str, aggregation: str, inserted: float) -> None:
    model, batch = tiny(), random_batch(3, all_columns=False)
    draws = torch.Generator().manual_seed(1)
    rows = []
    for mask in batch.response_mask.rows:
        drawn = torch.rand(len(mask), generator=draws) * (torch.rand(len(mask), generator=draws) < 0.7)
        rows.append(torch.where(mask, drawn, torch.full_like(drawn, inserted)))
    batch = replace(batch, token_weight=Ragged.from_rows(rows))
    train = Train(steps=1, lr=1e-3, max_grad_norm=None)
    mine, metrics = learn(model, batch, train, Algorithm(loss=loss, aggregation=aggregation))

    summed: dict[int, float] = {}
    for session, weight, mask in zip(batch.sessions, rows, batch.response_mask.rows, strict=True):
        summed[session] = summed.get(session, 0.0) + float(weight[mask].double().sum())
    count = sum(weight > 0 for weight in summed.values())
    total = torch.zeros((), dtype=torch.float64)
    assert batch.advantages is not None
    for i, (prompt, response, mask) in enumerate(
        zip(batch.prompt_ids.rows, batch.response_ids.rows, batch.response_mask.rows, strict=True)
    ):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        own = summed[batch.sessions[i]]
        divisor = {
            "token_mean": sum(summed.values()),
            "seq_mean_token_sum": count,
            "seq_mean_token_mean": count * own,
        }[aggregation]
        if not own or not divisor:
            continue
        ratio = (logprobs - logprobs.detach()).exp()
        policy = -logprobs if loss == "supervised" else -ratio * batch.advantages.rows[i]
        total = total + (rows[i] / divisor * torch.where(mask, policy, -logprobs)).sum()
    total.backward()
    assert mine.loss == pytest.approx(float(total.detach()), rel=1e-6)
    assert metrics["tokens"] == sum(int(mask.sum()) for mask in batch.response_mask.rows)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(mine.grads[name], p.grad, rtol=1e-6, atol=1e-7)
