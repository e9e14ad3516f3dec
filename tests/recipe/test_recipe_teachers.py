"""Teachers, routes, distillation and reward models: what is refused, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe

BASE: dict[str, Any] = {
    "name": "run",
    "model": {"random_init": {}},
    "tasks": {"sort": {"kind": "sort"}, "add": {"kind": "add", "domain": "math"}},
}
TWO = "teachers: {sort: {model: a}, math: {model: b}}\ndistill: {}\n"
ONE = "teachers: {t: {model: a}}\ndistill: {}\n"
URL = "teachers: {t: {url: 'http://127.0.0.1:8000/v1', model: a}}\n"
SAMPLED = "divergence: k1, signal: sampled"
FULL = "distill: {signal: full}"
PRODUCT = """
teachers: {t: {model: a, target: {t: 1.25, b: -0.25}}, b: {model: b}}
route: {map: {sort: t, math: t}}
"""
SUPERVISED = "algorithm: {loss: supervised, advantage: none}\n"
WATCHED = "reward: {models: {m: {model: a%s}}}"


def load(folder: Path, text: str) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(BASE | yaml.safe_load(text), sort_keys=False))
    load_recipe(path)


TEACHERS = [
    ("teachers: {t: {model: a}}", "teachers"),
    ("distill: {}", "distill"),
    (SUPERVISED + ONE, "distill"),
    (SUPERVISED + "teachers: {t: {model: a}}\nruntime: {kind: ray}", "teachers"),
    (SUPERVISED + "teachers: {t: {url: 'http://a/v1', model: a}}", "teachers.t.url"),
    (TWO + "route: {balance: shares}", "route.balance"),
    (TWO + "route: {balance: sigma, shares: {sort: 0.5, math: 0.5}}", "route.shares"),
    ("teachers: {'a/b': {model: a}}\ndistill: {}", "teachers"),
    ("teachers: {t: {}}\ndistill: {}", "teachers.t"),
    ("teachers: {t: {model: a, target: {t: 1.0, b: 0.0}}}\n" + FULL, "teachers.t.target"),
    ("teachers: {t: {model: a, target: {t: 1.2}}}\n" + FULL, "teachers.t.target"),
    (PRODUCT + "distill: {}", "distill.signal"),
    (PRODUCT.replace(": b}", ": b, placement: own}") + FULL, "teachers.t.target"),
    ("teachers: {t: {url: 'http://x'}}\ndistill: {}", "teachers.t"),
    ("teachers: {t: {model: a, student: {}}}\ndistill: {}", "teachers.t"),
    ("teachers: {t: {adapter: a, student: {}}}\ndistill: {}", "teachers.t"),
    ("teachers: {t: {url: 'http://x', model: m, adapter: a}}\ndistill: {}", "teachers.t"),
    ("teachers: {t: {adapter: a, dtype: bfloat16}}\ndistill: {}", "teachers.t.dtype"),
    ("teachers: {t: {adapter: a, device: cpu}}\ndistill: {}", "teachers.t.device"),
    (
        "model: {path: m, dtype: float64}\nteachers: {t: {adapter: a, engine: vllm}}\ndistill: {}",
        "model.dtype",
    ),
    ("teachers: {t: {url: 'ftp://x', model: a}}\ndistill: {}", "teachers.t.url"),
    ("teachers: {t: {model: a, device: gpu}}\ndistill: {}", "teachers.t.device"),
    ("teachers: {t: {model: a, concurrency: 1}}\ndistill: {}", "teachers.t.concurrency"),
    ("teachers: {t: {model: a, api_key_env: K}}\ndistill: {}", "teachers.t.api_key_env"),
    ("teachers: {t: {student: {}, dtype: bfloat16}}\ndistill: {}", "teachers.t.dtype"),
    ("teachers: {t: {student: {}, device: cpu}}\ndistill: {}", "teachers.t.device"),
    ("teachers: {t: {student: {}, tokenizer: a}}\ndistill: {}", "teachers.t.tokenizer"),
    ("teachers: {t: {model: a, prompt_prefix: '{answer'}}\ndistill: {}", "teachers.t.prompt_prefix"),
    *(
        (
            f"teachers: {{t: {{url: 'http://x', model: a, {key}}}}}\ndistill: {{}}",
            f"teachers.t.{key.partition(':')[0]}",
        )
        for key in (
            "placement: own",
            "placement: {own: {replicas: 2}}",
            "dtype: float64",
            "device: cpu",
            "batch_tokens: 1",
        )
    ),
    ("teachers: {sort: {model: a/b}, math: {model: a/b/, placement: own}}\ndistill: {}", "teachers.math"),
    ("runtime: {teachers_gb: 1.0}", "runtime.teachers_gb"),
    (
        "teachers: {t: {model: a, placement: own}}\ndistill: {}\nruntime: {teachers_gb: 1.0}",
        "runtime.teachers_gb",
    ),
]

ROUTES = [
    ("route: {by: task}", "route.by"),
    ("route: {measure_every: 2}", "route.measure_every"),
    (ONE + "route: {by: task}", "route.by"),
    (ONE + "route: {map: {sort: t}}", "route.map"),
    (ONE + "route: {shares: {t: 1.0}}", "route.shares"),
    (TWO + "route: {map: {sort: mth}}", "route.map.sort"),
    (TWO + "route: {map: {sort: {sort: 1.0, zzz: 1.0}}}", "route.map.sort"),
    (TWO + "route: {map: {sort: {sort: 1.0, math: 0.0}}}", "route.map.sort.math"),
    (TWO + "route: {map: {sort: {sort: 1.0, math: -1.0}}}", "route.map.sort.math"),
    (TWO + "route: {map: {sort: {}}}", "route.map.sort"),
    (TWO + "route: {map: {sort: ''}}", "route.map.sort"),
    (TWO + "route: {shares: {sort: 1.0}}", "route.shares"),
    (TWO + "route: {shares: {sort: 0.5, maths: 0.5}}", "route.shares"),
    (TWO + "route: {shares: {sort: 1.0, math: 0.0}}", "route.shares.math"),
    (TWO + "route: {shares: {sort: 0.5, math: 0.4}}", "route.shares"),
    (TWO + "route: {by: subject}", "route.by"),
    (TWO + "route: {by: tsk}", "route.by"),
    ("teachers: {sort: {model: a}, math: {model: b}, code: {model: c}}\ndistill: {}", "teachers.code"),
    (TWO + "route: {map: {maths: math}}", "route.map.maths"),
    (TWO + "tasks: {sort: {kind: sort}, plus: {kind: add, domain: math}, copy: {kind: copy}}", "route.map"),
    (
        TWO + "tasks: {sort: {kind: sort}, math: {kind: add}, a: {kind: copy, domain: maths}, "
        "b: {kind: copy, domain: maths}}",
        "route.map",
    ),
    (
        TWO + "tasks: {sort: {kind: sort}, math: {kind: add}, rows: {file: x.jsonl, domain: code}}",
        "route.map",
    ),
]

DISTILL = [
    (ONE, "divergence: k1, signal: sampled", "distill.divergence"),
    (ONE, "signal: sampled", "distill.divergence"),
    (ONE, "divergence: k2", "distill.divergence"),
    (ONE, "divergence: unbiased_reverse_kl, signal: full", "distill.divergence"),
    (ONE, "divergence: unbiased_reverse_kl, apply_as: advantage", "distill.divergence"),
    (ONE + "rollout: {top_p: 0.9}\n", "divergence: unbiased_reverse_kl", "distill.divergence"),
    (ONE, "apply_as: advantage", "distill.divergence"),
    (ONE, "signal: full, top_k: 8", "distill.top_k"),
    (ONE, f"{SAMPLED}, apply_as: reward, temperature: 0.5", "distill.temperature"),
    (URL, "signal: full", "distill.signal"),
    (URL, "temperature: 0.5", "distill.temperature"),
    (URL + "rollout: {temperature: 0.5}\n", "", "rollout.temperature"),
    (URL + "rollout: {temperature: 0.5}\n", f"{SAMPLED}, apply_as: advantage", "rollout.temperature"),
]

OFF = "teachers: {t: {model: a}}\nreward: {weight: 0.0}\n"
LOSS = f"{OFF}distill: {{}}\n"
ADVANTAGE = f"{OFF}distill: {{{SAMPLED}, apply_as: advantage}}\n"
REWARD = f"{OFF}distill: {{{SAMPLED}, apply_as: reward}}\n"
REWARDS = [
    ("reward: {weight: 0.0}", "reward.weight"),
    (SUPERVISED + "reward: {weight: 0.5}", "reward.weight"),
    (SUPERVISED + "reward: {log_only: true}", "reward.log_only"),
    ("reward: {log_only: true}", "reward.log_only"),
    (LOSS + "algorithm: {advantage: rloo}", "algorithm.advantage"),
    (LOSS + "algorithm: {advantage: none}", "algorithm.advantage"),
    (LOSS + "algorithm: {loss: cispo}", "algorithm.loss"),
    (LOSS + "algorithm: {clip_low: 0.1}", "algorithm.clip_low"),
    (LOSS + "algorithm: {old_logprobs: recompute}", "algorithm.old_logprobs"),
    (LOSS + "algorithm: {mismatch: token}", "algorithm.mismatch"),
    (LOSS + "algorithm: {kl: {place: reward}}", "algorithm.kl.place"),
    (LOSS + "critic: {}", "critic"),
    (LOSS + "refills: 4", "refills"),
    (ADVANTAGE + "algorithm: {advantage: rloo}", "algorithm.advantage"),
    (ADVANTAGE + "critic: {}", "critic"),
    (REWARD + "algorithm: {advantage: none}", "algorithm.advantage"),
    (REWARD + "algorithm: {advantage: gae}", "critic"),
    (REWARD + "rollout: {samples: 1}", "rollout.samples"),
    ("reward: {functions: []}", "reward.functions"),
    ("reward: {models: {'a b': {model: a}}}", "reward.models"),
    (WATCHED % ", weight: 0.0", "reward.models.m.weight"),
    (WATCHED % ", url: host", "reward.models.m.url"),
    (WATCHED % ", url: 'http://x', placement: own", "reward.models.m.placement"),
    (WATCHED % ", device: gpu", "reward.models.m.device"),
    (WATCHED % ", kind: judge, label: 1", "reward.models.m.label"),
    (WATCHED % ", prompt: '{response}'", "reward.models.m.prompt"),
    (WATCHED % ", kind: judge, prompt: '{prompt}'", "reward.models.m.prompt"),
    (WATCHED % ", kind: judge, prompt: '{reply}'", "reward.models.m.prompt"),
    (WATCHED % ", kind: judge, prompt: 'a } b'", "reward.models.m.prompt"),
]

ALLOWED = [
    PRODUCT + FULL,
    ONE.replace("{}", "{divergence: unbiased_reverse_kl}") + "rollout: {lag: 1}",
    ONE,
    TWO,
    LOSS,
    ADVANTAGE,
    REWARD,
    URL + "distill: {temperature: 1.0}\nrollout: {temperature: 0.5}",
    URL.replace("model: a", "model: a, prompt_prefix: 'Answer: {answer}', context: 64, tokenizer: b")
    + "distill: {}",
    "teachers: {t: {student: {}}}\ndistill: {}",
    "teachers: {sort: {adapter: a}, math: {adapter: a, prompt_prefix: '{answer}'}}\ndistill: {signal: full}",
    "teachers: {sort: {model: a}, math: {model: a, adapter: b, dtype: bfloat16}}\ndistill: {}",
    "teachers: {sort: {student: {}}, math: {student: {}, prompt_prefix: '{{}} {answer}'}}\ndistill: {}",
    ONE + "runtime: {teachers_gb: 1.0}",
    WATCHED % "" + "\nruntime: {teachers_gb: 1.0}",
    TWO + "route: {by: task, map: {add: {math: 3.0, sort: 1.0}}}",
    TWO + "route: {shares: {sort: 0.3333333, math: 0.6666667}, measure_every: 0}",
    TWO + "tasks: {rows: {file: x.jsonl}}",
    TWO + "tasks: {rows: {file: x.jsonl}}\nroute: {by: subject, map: {algebra: math}}",
    ONE.replace("{}", "{divergence: jsd}"),
    ONE.replace("{}", "{signal: full, temperature: 0.5}"),
    LOSS + "rollout: {samples: 1}\nalgorithm: {entropy: 0.01, kl: {place: loss}}",
    LOSS.replace("weight: 0.0", "weight: 0.0, log_only: true"),
    LOSS.replace("weight: 0.0", "weight: 0.0, functions: []") + "eval: {rows: 0}",
    ADVANTAGE + "rollout: {samples: 1}\nalgorithm: {loss: cispo, clip_high: 0.3}",
    REWARD + "algorithm: {advantage: gae, lam: 0.9}\ncritic: {}",
    ONE + "algorithm: {advantage: rloo}\nrefills: 4",
    "reward: {functions: [], models: {m: {model: a}}}",
]


@pytest.mark.parametrize(("text", "path"), [*TEACHERS, *ROUTES, *REWARDS])
def test_what_can_not_work_is_refused(tmp_path: Path, text: str, path: str) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load(tmp_path, text)
    assert [error.path for error in caught.value.errors] == [path], str(caught.value)


@pytest.mark.parametrize(("text", "options", "path"), DISTILL)
def test_what_can_not_be_distilled_is_refused(tmp_path: Path, text: str, options: str, path: str) -> None:
    text = text.replace("distill: {}\n", "") + f"distill: {{{options}}}"
    test_what_can_not_work_is_refused(tmp_path, text, path)


@pytest.mark.parametrize("text", ALLOWED)
def test_what_can_work_is_allowed(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


def test_teachers_that_say_nothing_are_not_called_the_same(tmp_path: Path) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load(tmp_path, "teachers: {sort: {}, math: {}}\ndistill: {}")
    assert [error.path for error in caught.value.errors] == ["teachers.sort", "teachers.math"]
