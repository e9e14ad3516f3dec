"""Check teachers by their files, tokenizers and configs, without loading weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from practicum.engines.table import ENGINES
from practicum.errors import RecipeError, RecipeErrors
from practicum.models.adapter_files import SavedAdapter
from practicum.models.load_model import require_known_layers, skeleton
from practicum.models.model_files import (
    must_read,
    read_config,
    read_image_processor,
    require_model_folder,
)
from practicum.models.processor import load_processor
from practicum.models.vision import is_vision
from practicum.recipe.checks.routing import destinations
from practicum.recipe.derived import parts_of
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.sessions.chat import make_encoder
from practicum.tasks.messages import prompt_text
from practicum.tasks.stream import make_stream
from practicum.teachers.load_teachers import base_spec, describe_base
from practicum.teachers.route import before_text, routed_value
from practicum.teachers.shared_tokens import Coverage, SharedTokens
from practicum.teachers.vocabulary import compare_vocabularies, load_teacher_tokenizer

LOOKED_AT = 2_000
"""Number of prompts to encode to find a teacher's longest one."""
COVERED, LEAST_SHARED = 256, 0.5
"""Number of prompts that show what tokenizers share, and the least share of tokens."""
_IMAGE_KEYS = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "size")
"""Settings of an image processor that determine how an image becomes patches."""


def check_teachers(
    recipe: Recipe,
    student: PreTrainedTokenizerBase,
    *,
    shared: Mapping[str, SharedTokens],
    longest: Mapping[str, int],
    longest_answer: int,
    uses_chat: bool,
    student_vocab: int | None = None,
    student_context: int | None = None,
) -> list[str]:
    """Describe each teacher. Raise RecipeErrors with all mistakes.

    `longest` has the tokens of each teacher's longest prompt (`longest_prompts`), `student_vocab` is the
    width of the student's output, `student_context` its maximum sequence length, and `shared` has the tokens
    that teachers with another tokenizer share with it. Call `check_routes` before.
    """
    findings, distill = [], recipe.distill
    covered = coverages(recipe, shared)
    problems = list(check_images(recipe.teachers, recipe.model, student))
    if distill is not None and distill.compares_top and distill.top_k > len(student):
        expected = f"at most the {len(student)} tokens of the vocabulary"
        advice = "lower it, or set distill.signal: full"
        problems.append(RecipeError("distill.top_k", f"{distill.top_k}", expected, advice))
    for name, teacher in recipe.teachers.items():
        check = _Check(name, teacher, recipe.model, problems, covered.get(name))
        findings.append(f"teacher {name}: {check.describe(student, uses_chat, student_context)}")
        is_full = distill is not None and distill.signal == "full"
        if is_full and None not in (check.width, student_vocab) and check.width != student_vocab:
            found = f"{check.width:,} outputs, where the student has {student_vocab:,}"
            expected = "as many outputs as the student's for distill.signal full"
            advice = "set distill.signal: top_k, which compares tokens by id"
            problems.append(RecipeError(f"teachers.{name}.model", found, expected, advice))
        extra = 1 if teacher.url is not None else 0
        problem = check_context(name, check.context, longest[name], longest_answer, extra, teacher.context)
        problems += [problem] if problem else []
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    return findings + renderings(recipe, student, shared)[1]


def renderings(
    recipe: Recipe, student: PreTrainedTokenizerBase, shared: Mapping[str, SharedTokens]
) -> tuple[dict[str, str], list[str]]:
    """Compare how the chat templates of the teachers and the student write a prompt.

    Return a word for each teacher (none without chat prompts), and both texts where they differ. Teachers
    with the student's vocabulary have its template too, or are refused.
    """
    encode, stream = make_encoder(recipe, student), make_stream(recipe.tasks, recipe.seed).take(COVERED)
    chats = (p for p in stream if recipe.tasks[p.task].chat or not isinstance(p.content, str))
    if (prompt := next(chats, None)) is None or encode.processor is not None:
        return {}, []
    words, lines, own = {}, [], student.decode(encode(prompt).ids)
    for name, teacher in recipe.teachers.items():
        reader = shared[name].encode if name in shared else encode
        text = reader.tokenizer.decode(reader(prompt).ids)
        thinks = "enable_thinking" in str(reader.tokenizer.chat_template)
        words[name] = ("same" if text == own else "other") + ", can think" * thinks
        if teacher.url is not None and teacher.tokenizer is None:
            words[name] = "unknown"
        elif text != own:
            mode = " (the template has thinking modes, and this is the default one)" if thinks else ""
            lines.append(f"teacher {name} reads {prompt} as {text!r}{mode}, the student as {own!r}")
    return words, lines


def check_context(
    name: str,
    context: int | None,
    longest_prompt: int,
    longest_answer: int,
    extra: int = 0,
    asked: int | None = None,
) -> RecipeError | None:
    """Return a problem if the teacher's context is too short for prompt, response and the engine's extra
    token.

    `longest_prompt` includes the teacher's prompt prefix. `asked` is teachers.<name>.context.
    """
    if context is not None and asked is not None and asked > context:
        found, expected = f"{asked}", f"at most the model's context of {context}"
        return RecipeError(f"teachers.{name}.context", found, expected)
    limit = context if asked is None else asked
    needed = longest_prompt + longest_answer + extra
    if limit is None or needed <= limit:
        return None
    parts = f"a prompt of {longest_prompt} tokens + {longest_answer} of response" + (" + 1" if extra else "")
    advice = "use a teacher with a longer context, or reduce prompts, prompt_prefix or rollout.max_new_tokens"
    advice = advice if asked is None else f"raise it, {advice}"
    return RecipeError(f"teachers.{name}.context", f"{parts} = {needed}", f"at most {limit}", advice)


def load_teacher_config(teacher: Teacher, path: str) -> PreTrainedConfig | None:
    """Load the text config of a local teacher, once per process. Return None for others."""
    if teacher.url is not None or teacher.model is None:
        return None
    require_model_folder(teacher.model, f"{path}.model")
    with must_read(teacher.model, f"{path}.model", "a model in HuggingFace format"):
        return read_config(teacher.model).get_text_config()


class _Check:
    """Checks one teacher, and adds problems to a list."""

    def __init__(
        self,
        name: str,
        teacher: Teacher,
        source: Model,
        problems: list[RecipeError],
        covered: Coverage | None,
    ) -> None:
        self.name, self.teacher, self.source, self.problems = name, teacher, source, problems
        self.covered = covered
        self.path = f"teachers.{name}"
        self.context: int | None = None
        self.width: int | None = None

    def describe(self, student: PreTrainedTokenizerBase, chat: bool, student_context: int | None) -> str:
        """Compare the teacher's tokens with the student's, and describe the teacher."""
        if self.teacher.student is not None:
            self.context = student_context
            every = self.teacher.student.every
            return "a copy of the student, " + (
                f"updated every {every} steps" if every else "with its initial weights"
            )
        parts = []
        try:
            if self.teacher.adapter is not None:
                self.context = student_context
                parts.append(self._adapter())
            if config := load_teacher_config(self.teacher, self.path):
                self.context = getattr(config, "max_position_embeddings", None)
                self.width = getattr(config, "vocab_size", None)
                parts.append(next(iter(config.architectures or ()), type(config).__name__))
                if self.teacher.engine_traits.runs_transformers and self.teacher.model is not None:
                    require_known_layers(self.teacher.model, f"{self.path}.model")
            tokenizer = load_teacher_tokenizer(self.teacher, self.path)
        except RecipeError as problem:
            self.problems.append(problem)
            return "can't be loaded"
        if self.teacher.url is not None:
            parts.append(f"{self.teacher.model} at {self.teacher.url}")
        if (limit := self.teacher.context or self.context) is not None:
            parts.append(f"context {limit}")
        parts.append(self._compare(student, tokenizer, chat))
        return ", ".join(parts)

    def _adapter(self) -> str:
        """Describe the adapter and its base. Raise RecipeError if they don't fit."""
        teacher, source = self.teacher, self.source
        assert teacher.adapter is not None
        spec, about = base_spec(source, teacher), describe_base(source, teacher)
        saved = SavedAdapter.read(teacher.adapter, f"{self.path}.adapter")
        with must_read(about, f"{self.path}.model", "a model in HuggingFace format"):
            bare = skeleton(spec)
        saved.check_fits(bare, about)
        if (problem := ENGINES[teacher.engine].adapter_problem(saved, bare.config.model_type)) is not None:
            advice = f"set {self.path}.engine to another one, or {self.path}.model to the merged model"
            found, expected = f"{teacher.engine} with {problem}", "an engine that computes this adapter"
            raise RecipeError(f"{self.path}.engine", found, expected, advice)
        on = f"{saved.describe()} on {about}"
        if teacher.model is None and source.lora is None:
            on += ", loaded separately because the student trains all its weights"
        if saved.base is None:
            known = saved.config.get("base_model_name_or_path") or "nothing"
            on += f" (unverified: the adapter names {known} as its base)"
        return on

    def _compare(
        self, student: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase | None, chat: bool
    ) -> str:
        if tokenizer is None and self.teacher.adapter is not None:
            return "the student's vocabulary"
        if tokenizer is None:
            return "a vocabulary that is not compared"
        key = "adapter" if self.teacher.adapter is not None else "model"
        key = "tokenizer" if self.teacher.tokenizer is not None else key
        if (covered := self.covered) is not None:
            shares = (
                f"{covered.share:.1%} of the tokens of prompts and answers, {covered.numeral_share:.1%} of"
            )
            found = f"another tokenizer, which shares {shares} those with digits"
            if covered.share < LEAST_SHARED:
                expected = f"at least {LEAST_SHARED:.0%} of the tokens"
                advice = "take a teacher whose tokenizer cuts text more like the student's"
                self.problems.append(RecipeError(f"{self.path}.{key}", found, expected, advice))
            return found
        problems = compare_vocabularies(student, tokenizer, self.name, chat=chat, key=key)
        self.problems += problems
        return "another vocabulary" if problems else f"same vocabulary ({len(tokenizer):,} tokens)"


def check_bases(teachers: Mapping[str, Teacher], student: Model, base: str) -> None:
    """Raise if an adapter on the student's base was trained on another. `base` is the base's fingerprint."""
    for name, teacher in teachers.items():
        if teacher.adapter is not None and teacher.model is None:
            saved = SavedAdapter.read(teacher.adapter, f"teachers.{name}.adapter")
            saved.check_base(base, describe_base(student, teacher))


def coverages(recipe: Recipe, shared: Mapping[str, SharedTokens]) -> dict[str, Coverage]:
    """Return the share of tokens that teachers with another tokenizer can compare."""
    found = dict.fromkeys(shared, Coverage())
    for prompt in make_stream(recipe.tasks, recipe.seed).take(COVERED if shared else 0):
        named = shared.keys() & set(recipe.teachers)
        if len(recipe.teachers) > 1:
            named &= set(destinations(recipe.route, routed_value(prompt, recipe.route)))
        answer = "" if prompt.answer is None else str(prompt.answer)
        for name in named:
            text = f"{prompt_text(prompt.content)}{answer}"
            found[name] += shared[name].coverage(shared[name].student.encode(text, add_special_tokens=False))
    return found


def longest_prompts(
    recipe: Recipe, student: PreTrainedTokenizerBase, shared: Mapping[str, SharedTokens], longest: int
) -> dict[str, int]:
    """Return the tokens of each teacher's longest prompt including its prefix. `longest` is over all
    prompts."""
    plain = not shared and all(teacher.prompt_prefix is None for teacher in recipe.teachers.values())
    if plain and len(recipe.teachers) == 1:
        return dict.fromkeys(recipe.teachers, longest)
    lengths, targets = dict.fromkeys(recipe.teachers, 0), parts_of(recipe.teachers)
    stream, encode = make_stream(recipe.tasks, recipe.seed), make_encoder(recipe, student)
    seen: set[tuple[str, int]] = set()
    for prompt in stream.take(LOOKED_AT):
        if (prompt.task, prompt.index) in seen:  # rows of small files repeat in every epoch
            continue
        seen.add((prompt.task, prompt.index))
        length = len(encode(prompt).ids)
        names = recipe.teachers
        if len(names) > 1:
            names = destinations(recipe.route, routed_value(prompt, recipe.route))
        for name in {part for routed in names for part in targets.get(routed, (routed,))}:
            before = before_text(recipe.teachers[name], prompt)
            more = len(student.encode(before, add_special_tokens=False)) if before else 0
            own = len(shared[name].encode(prompt).ids) if name in shared else length
            lengths[name] = max(lengths[name], own + more)
    return lengths


def check_images(
    teachers: Mapping[str, Teacher], source: Model, student: PreTrainedTokenizerBase
) -> Iterator[RecipeError]:
    """Check that each teacher is a vision model with the student's image settings, because it reads its
    patches."""
    if (processor := load_processor(source, student)) is None:
        return
    for name, teacher in teachers.items():
        path, images = f"teachers.{name}", None
        if teacher.url is not None:
            expected = "a local model, for a student that takes images"
            yield RecipeError(f"{path}.url", teacher.url, expected, f"load it with {path}.model alone")
        if teacher.url is not None or teacher.model is None:  # a copy, or an adapter on the student's base
            continue
        try:
            with must_read(teacher.model, f"{path}.model", "a vision model"):
                config = read_config(teacher.model)
                images = read_image_processor(teacher.model) if is_vision(config) else None
        except RecipeError as problem:
            yield problem
            continue
        own, theirs = (
            {key: str(getattr(x, key, None)) for key in _IMAGE_KEYS}
            for x in (processor.image_processor, images)
        )
        differ = [key for key in _IMAGE_KEYS if own[key] != theirs[key]]
        if images is None:
            found, expected = f"{teacher.model}, a {config.model_type}", "a vision model, as the student is"
            yield RecipeError(f"{path}.model", found, expected)
        elif differ:
            found = ", ".join(f"{key} {theirs[key]}" for key in differ)
            expected = "the student's " + ", ".join(f"{key} {own[key]}" for key in differ)
            yield RecipeError(f"{path}.model", f"an image processor with {found}", expected)
