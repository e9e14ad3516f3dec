"""Teachers, routes, distillation and reward models: what is refused, where and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe

BASE: dict[str, Any] = {
    "name": "run",
    "model": {"make": {}},
    "tasks": {"sort": {"kind": "sort"}, "add": {"kind": "add", "domain": "math"}},
}
TWO = "teachers: {sort: {model: a}, math: {model: b}}\ndistill: {}\n"
ONE = "teachers: {t: {model: a}}\ndistill: {}\n"
URL = "teachers: {t: {url: 'http://127.0.0.1:8000/v1', model: a}}\n"
SAMPLED = "divergence: k1, signal: sampled"
FULL = "{signal: full}"
PRODUCT = (
    "teachers: {t: {model: a, target: {t: 1.25, b: -0.25}}, b: {model: b}}\nroute: {to: {sort: t, math: t}}\n"
)
SUPERVISED = "algorithm: {loss: supervised, advantage: none}\n"
WATCHED = "reward: {models: {m: {model: a%s}}}"


def load(folder: Path, text: str) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(BASE | yaml.safe_load(text), sort_keys=False))
    load_recipe(path)


TEACHERS = [
    ("teachers: {t: {model: a}}", "teachers", "t without distill", "add distill: {}"),
    ("distill: {}", "distill", "without teachers", "remove distill"),
    (SUPERVISED + ONE, "distill", "algorithm.loss supervised", "remove algorithm.loss"),
    (SUPERVISED + "teachers: {t: {model: a}}", "teachers", "supervised", "remove algorithm.loss"),
    ("teachers: {'a/b': {model: a}}\ndistill: {}", "teachers", "a teacher named 'a/b'", "metrics"),
    ("teachers: {t: {}}\ndistill: {}", "teachers.t", "neither model, url, adapter nor student", "one way"),
    (
        f"teachers: {{t: {{model: a, target: {{t: 1.0, b: 0.0}}}}}}\ndistill: {FULL}",
        "teachers.t.target",
        "b",
        "add",
    ),
    (
        f"teachers: {{t: {{model: a, target: {{t: 1.2}}}}}}\ndistill: {FULL}",
        "teachers.t.target",
        "1.2",
        "sum is 1",
    ),
    (PRODUCT + "distill: {}", "distill.signal", "top_k with teachers.t.target", "signal: full"),
    (
        PRODUCT.replace("model: b", "model: b, placement: own") + f"distill: {FULL}",
        "teachers.t.target",
        "b",
        "colo",
    ),
    ("teachers: {t: {url: 'http://x'}}\ndistill: {}", "teachers.t", "url without model", "on that server"),
    ("teachers: {t: {model: a, student: {}}}\ndistill: {}", "teachers.t", "model and student", "one way"),
    ("teachers: {t: {adapter: a, student: {}}}\ndistill: {}", "teachers.t", "adapter and student", "one way"),
    (
        "teachers: {t: {url: 'http://x', model: m, adapter: a}}\ndistill: {}",
        "teachers.t",
        "model and url and adapter",
        "set model to that name",
    ),
    (
        "teachers: {t: {adapter: a, dtype: bfloat16}}\ndistill: {}",
        "teachers.t.dtype",
        "base",
        "as the student is",
    ),
    (
        "teachers: {t: {adapter: a, device: cpu}}\ndistill: {}",
        "teachers.t.device",
        "base",
        "as the student is",
    ),
    (
        "model: {path: m, dtype: float64}\nteachers: {t: {adapter: a, engine: vllm}}\ndistill: {}",
        "model.dtype",
        "float64 with engine vllm",
        "float32",
    ),
    ("teachers: {t: {url: 'ftp://x', model: a}}\ndistill: {}", "teachers.t.url", "'ftp://x'", "http://"),
    ("teachers: {t: {model: a, device: gpu}}\ndistill: {}", "teachers.t.device", "'gpu'", "cuda:N"),
    ("teachers: {t: {model: a, retries: 1}}\ndistill: {}", "teachers.t.retries", "1 without url", "server"),
    ("teachers: {t: {model: a, concurrency: 1}}\ndistill: {}", "teachers.t.concurrency", "url", "server"),
    ("teachers: {t: {model: a, api_key_env: K}}\ndistill: {}", "teachers.t.api_key_env", "'K'", "server"),
    ("teachers: {t: {student: {}, dtype: bfloat16}}\ndistill: {}", "teachers.t.dtype", "student", "model"),
    ("teachers: {t: {student: {}, device: cpu}}\ndistill: {}", "teachers.t.device", "student", "model"),
    ("teachers: {t: {student: {}, tokenizer: a}}\ndistill: {}", "teachers.t.tokenizer", "'a'", "model"),
    ("teachers: {t: {model: a, before: '{answer'}}\ndistill: {}", "teachers.t.before", "lone '{'", "{{ }}"),
    *(
        (
            f"teachers: {{t: {{url: 'http://x', model: a, {key}}}}}\ndistill: {{}}",
            path,
            words,
            "server decides",
        )
        for key, path, words in (
            ("placement: own", "teachers.t.placement", "'own' with url"),
            ("placement: {own: {replicas: 2}}", "teachers.t.placement", "{own: {replicas: 2}} with url"),
            ("dtype: float64", "teachers.t.dtype", "'float64' with url"),
            ("device: cpu", "teachers.t.device", "'cpu' with url"),
            ("batch_tokens: 1", "teachers.t.batch_tokens", "1 with url"),
        )
    ),
    (
        "teachers: {sort: {model: a/b}, math: {model: a/b/, placement: own}}\ndistill: {}",
        "teachers.math",
        "the same teacher as sort",
        "let route.to send its prompts to sort",
    ),
    ("runtime: {teachers_gb: 1.0}", "runtime.teachers_gb", "without a colocated teacher", "sleep"),
    (
        "teachers: {t: {model: a, placement: own}}\ndistill: {}\nruntime: {teachers_gb: 1.0}",
        "runtime.teachers_gb",
        "without a colocated teacher",
        "sleep",
    ),
]

ROUTES = [
    ("route: {by: task}", "route.by", "'task' without teachers", "add teachers"),
    ("route: {measure_every: 1}", "route.measure_every", "1 without teachers", "add teachers"),
    (ONE + "route: {by: task}", "route.by", "with one teacher", "takes every prompt"),
    (ONE + "route: {to: {sort: t}}", "route.to", "with one teacher", "takes every prompt"),
    (ONE + "route: {shares: {t: 1.0}}", "route.shares", "with one teacher", "takes every prompt"),
    (TWO + "route: {to: {sort: mth}}", "route.to.sort", "'mth'", "did you mean math?"),
    (TWO + "route: {to: {sort: {sort: 1.0, zzz: 1.0}}}", "route.to.sort", "'zzz'", "one of sort, math"),
    (TWO + "route: {to: {sort: {sort: 1.0, math: 0.0}}}", "route.to.sort.math", "0", "gets none"),
    (TWO + "route: {to: {sort: {sort: 1.0, math: -1.0}}}", "route.to.sort.math", "-1", "greater than 0"),
    (TWO + "route: {to: {sort: {}}}", "route.to.sort", "nobody", "sort, math"),
    (TWO + "route: {to: {sort: ''}}", "route.to.sort", "nobody", "sort, math"),
    (TWO + "route: {shares: {sort: 1.0}}", "route.shares", "no share of math", "each teacher: sort, math"),
    (
        TWO + "route: {shares: {sort: 0.5, maths: 0.5}}",
        "route.shares",
        "no share of math and no teacher maths",
        "did you mean math?",
    ),
    (TWO + "route: {shares: {sort: 1.0, math: 0.0}}", "route.shares.math", "0", "greater than 0"),
    (TWO + "route: {shares: {sort: 0.5, math: 0.4}}", "route.shares", "a sum of 0.9", "a sum of 1"),
    (TWO + "route: {by: subject}", "route.by", "'subject', a column, with the built-in task sort", "domain"),
    (TWO + "route: {by: tsk}", "route.by", "'tsk'", "did you mean task?"),
    (
        "teachers: {sort: {model: a}, math: {model: b}, code: {model: c}}\ndistill: {}",
        "teachers.code",
        "no prompt goes to (by domain: sort, math)",
        "remove it",
    ),
    (TWO + "route: {to: {maths: math}}", "route.to.maths", "a domain of no task", "did you mean math?"),
    (
        TWO + "tasks: {sort: {kind: sort}, plus: {kind: add, domain: math}, copy: {kind: copy}}",
        "route.to",
        "no teacher for the domain 'copy' of task copy",
        "set route.to: {copy: sort or math}",
    ),
    (
        TWO + "tasks: {sort: {kind: sort}, math: {kind: add}, a: {kind: copy, domain: maths}, "
        "b: {kind: copy, domain: maths}}",
        "route.to",
        "no teacher for the domain 'maths' of tasks a, b",
        "did you mean math?",
    ),
    (
        TWO + "tasks: {sort: {kind: sort}, math: {kind: add}, rows: {file: x.jsonl, domain: code}}",
        "route.to",
        "no teacher for the domain 'code' of task rows",
        "route.to",
    ),
]

DISTILL = [
    (ONE, "divergence: k1, signal: sampled", "distill.divergence", "k1 with signal sampled", "k1_straight"),
    (ONE, "signal: sampled", "distill.divergence", "reverse_kl with signal sampled", "top_k or full"),
    (ONE, "divergence: k2", "distill.divergence", "k2 with signal top_k", "signal sampled"),
    (ONE, "divergence: unbiased_reverse_kl, signal: full", "distill.divergence", "full", "use reverse_kl"),
    (
        ONE + "rollout: {top_p: 0.9}\n",
        "divergence: unbiased_reverse_kl",
        "distill.divergence",
        "truncated",
        "sample from all",
    ),
    (ONE, "through: advantage", "distill.divergence", "through advantage", "k1, k2 or k3"),
    (
        ONE,
        "signal: full, top_k: 8",
        "distill.top_k",
        "8 with distill.signal full",
        "distill.signal to top_k",
    ),
    (ONE, "beta: 0.1", "distill.beta", "0.1 with distill.divergence reverse_kl", "jsd"),
    (
        ONE,
        f"{SAMPLED}, through: reward, temperature: 0.5",
        "distill.temperature",
        "0.5 with rollout.temperature 1",
        "the policy that sampled",
    ),
    (URL, "signal: full", "distill.signal", "full with the teacher t behind a URL", "hidden states"),
    (
        URL,
        "temperature: 0.5",
        "distill.temperature",
        "0.5 with the teacher t",
        "set distill.temperature: 1.0",
    ),
    (
        URL + "rollout: {temperature: 0.5}\n",
        "",
        "rollout.temperature",
        "0.5 with the teacher t",
        "set distill.temperature: 1.0",
    ),
    (
        URL + "rollout: {temperature: 0.5}\n",
        f"{SAMPLED}, through: advantage",
        "rollout.temperature",
        "0.5 with the teacher t",
        "set rollout.temperature: 1.0",
    ),
]

OFF = "teachers: {t: {model: a}}\nreward: {weight: 0.0}\n"
LOSS = f"{OFF}distill: {{}}\n"
ADVANTAGE = f"{OFF}distill: {{{SAMPLED}, through: advantage}}\n"
REWARD = f"{OFF}distill: {{{SAMPLED}, through: reward}}\n"
REWARDS = [
    ("reward: {weight: 0.0}", "reward.weight", "0 without distill", "nothing is left to learn from"),
    (SUPERVISED + "reward: {weight: 0.5}", "reward.weight", "0.5 with algorithm.loss", "not judged"),
    (SUPERVISED + "reward: {watch: true}", "reward.watch", "true with algorithm.loss", "not judged"),
    ("reward: {watch: true}", "reward.watch", "true with reward.weight 1", "anyway"),
    (
        LOSS + "algorithm: {advantage: rloo}",
        "algorithm.advantage",
        "'rloo' with reward.weight 0",
        "no advantage",
    ),
    (
        LOSS + "algorithm: {advantage: none}",
        "algorithm.advantage",
        "'none' with reward.weight 0",
        "no advantage",
    ),
    (LOSS + "algorithm: {loss: cispo}", "algorithm.loss", "'cispo' with reward.weight 0", "no policy loss"),
    (LOSS + "algorithm: {clip_low: 0.1}", "algorithm.clip_low", "0.1 with reward.weight 0", "no policy loss"),
    (LOSS + "algorithm: {gamma: 0.9}", "algorithm.gamma", "0.9 with reward.weight 0", "no advantage"),
    (LOSS + "algorithm: {old_logprobs: recompute}", "algorithm.old_logprobs", "'recompute'", "no policy"),
    (LOSS + "algorithm: {mismatch: {weights: token}}", "algorithm.mismatch", "a correction", "policy loss"),
    (LOSS + "algorithm: {kl: {place: reward}}", "algorithm.kl.place", "reward with", "no reward"),
    (LOSS + "critic: {}", "critic", "{} with reward.weight 0", "no advantage is estimated"),
    (LOSS + "buffer: {filter_flat_groups: true}", "buffer.filter_flat_groups", "weight 0", "flat in rewards"),
    (
        ADVANTAGE + "algorithm: {advantage: rloo}",
        "algorithm.advantage",
        "through advantage",
        "no advantage is",
    ),
    (ADVANTAGE + "critic: {}", "critic", "through advantage", "no advantage is estimated"),
    (REWARD + "algorithm: {advantage: none}", "algorithm.advantage", "none with", "needs an advantage"),
    (REWARD + "algorithm: {advantage: gae}", "critic", "no critic", "add critic"),
    (REWARD + "rollout: {samples: 1}", "rollout.samples", "1 with algorithm.advantage grpo", "group of one"),
    ("reward: {functions: []}", "reward.functions", "no reward", "a weight that is not 0"),
    ("reward: {models: {'a b': {model: a}}}", "reward.models", "named 'a b'", "metrics"),
    (WATCHED % ", weight: 0.0", "reward.models.m.weight", "0", "remove"),
    (WATCHED % ", url: host", "reward.models.m.url", "'host'", "http://"),
    (WATCHED % ", url: 'http://x', placement: own", "reward.models.m.placement", "'own' with url", "server"),
    (WATCHED % ", retries: 1", "reward.models.m.retries", "1 without url", "server"),
    (WATCHED % ", device: gpu", "reward.models.m.device", "'gpu'", "cuda:N"),
    (WATCHED % ", kind: judge, label: 1", "reward.models.m.label", "1 with kind judge", "classifier"),
    (WATCHED % ", scale: 1.0", "reward.models.m.scale", "1.0 with kind classifier", "kind to judge"),
    (WATCHED % ", prompt: '{response}'", "reward.models.m.prompt", "with kind classifier", "kind to judge"),
    (WATCHED % ", max_new_tokens: 1", "reward.models.m.max_new_tokens", "classifier", "kind to judge"),
    (WATCHED % ", kind: judge, prompt: '{prompt}'", "reward.models.m.prompt", "no {response}", "not see"),
    (WATCHED % ", kind: judge, prompt: '{reply}'", "reward.models.m.prompt", "the field {reply}", "{answer}"),
    (WATCHED % ", kind: judge, prompt: 'a } b'", "reward.models.m.prompt", "a lone '}'", "{{ }}"),
]

ALLOWED = [
    PRODUCT + f"distill: {FULL}",
    ONE,
    TWO,
    LOSS,
    ADVANTAGE,
    REWARD,
    URL + "distill: {temperature: 1.0}\nrollout: {temperature: 0.5}",
    URL.replace("model: a", "model: a, before: 'Answer: {answer}', context: 64, tokenizer: b")
    + "distill: {}",
    "teachers: {t: {student: {}}}\ndistill: {}",
    "teachers: {sort: {adapter: a}, math: {adapter: a, before: '{answer}'}}\ndistill: {signal: full}",
    "teachers: {sort: {model: a}, math: {model: a, adapter: b, dtype: bfloat16}}\ndistill: {}",
    "teachers: {sort: {student: {}}, math: {student: {}, before: '{{}} {answer}'}}\ndistill: {}",
    ONE + "runtime: {teachers_gb: 1.0}",
    WATCHED % "" + "\nruntime: {teachers_gb: 1.0}",
    TWO + "route: {by: task, to: {add: {math: 3.0, sort: 1.0}}}",
    TWO + "route: {shares: {sort: 0.3333333, math: 0.6666667}, measure_every: 0}",
    TWO + "tasks: {rows: {file: x.jsonl}}",
    TWO + "tasks: {rows: {file: x.jsonl}}\nroute: {by: subject, to: {algebra: math}}",
    ONE.replace("{}", "{divergence: jsd, beta: 0.1}"),
    ONE.replace("{}", "{signal: full, temperature: 0.5}"),
    LOSS + "rollout: {samples: 1}\nalgorithm: {entropy: 0.01, kl: {place: loss}}",
    LOSS.replace("weight: 0.0", "weight: 0.0, watch: true"),
    LOSS.replace("weight: 0.0", "weight: 0.0, functions: []") + "eval: {rows: 0}",
    ADVANTAGE + "rollout: {samples: 1}\nalgorithm: {loss: cispo, clip_high: 0.3}",
    REWARD + "algorithm: {advantage: gae, gamma: 0.9}\ncritic: {}",
    ONE + "algorithm: {advantage: rloo}\nbuffer: {filter_flat_groups: true}",
    "reward: {functions: [], models: {m: {model: a}}}",
    "reward: {functions: [{weight: 0.0}], models: {m: {model: a, kind: judge, scale: 1.0}}}",
    "reward: {models: {m: {model: a, url: 'https://host/v1', retries: 0}}}",
]


@pytest.mark.parametrize(("text", "path", "found", "fix"), [*TEACHERS, *ROUTES, *REWARDS])
def test_what_can_not_work_is_refused_with_its_path_and_fix(
    tmp_path: Path, text: str, path: str, found: str, fix: str
) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load(tmp_path, text)
    assert [error.path for error in caught.value.errors] == [path], str(caught.value)
    error = caught.value.errors[0]
    assert found in error.found, str(error)
    assert fix in f"{error.expected}\n{error.suggestion}", str(error)


@pytest.mark.parametrize(("text", "options", "path", "found", "fix"), DISTILL)
def test_what_can_not_be_distilled_is_refused(
    tmp_path: Path, text: str, options: str, path: str, found: str, fix: str
) -> None:
    text = text.replace("distill: {}\n", "") + f"distill: {{{options}}}"
    test_what_can_not_work_is_refused_with_its_path_and_fix(tmp_path, text, path, found, fix)


@pytest.mark.parametrize("text", ALLOWED)
def test_what_can_work_is_allowed(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


def test_teachers_that_say_nothing_are_not_called_the_same(tmp_path: Path) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load(tmp_path, "teachers: {sort: {}, math: {}}\ndistill: {}")
    assert [error.found.partition(" (")[0] for error in caught.value.errors] == [
        "neither model, url, adapter nor student"
    ] * 2
