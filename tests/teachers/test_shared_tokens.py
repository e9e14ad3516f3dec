"""Tokens that two tokenizers share, with tokenizers that are trained here."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from practicum.engines.protocol import Scores
from practicum.errors import RecipeError
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.tasks.prompts import Encoder, Prompt
from practicum.teachers.shared_tokens import SharedTokens, token_bytes
from practicum.teachers.teacher_checks import renderings

TEXTS = [
    "the cat sat on the mat and counted 12 mice, 345 birds and 6789 fish",
    "2 + 17 = 19, and 100 - 58 = 42; so the sum is 61",
    "naïve café – größer als 3,14 ≈ π, 東京 and 🙂",
    "a list: one two three four five six seven eight nine ten eleven twelve",
] * 3
JOINED = ("ab", "bd", "cc", "da", "ec")
"""Pairs of letters that are one token of a teacher."""
KINDS = ("bytes", "small bytes", "digits", "unigram", "fallback", "bos", "letters")


@cache
def trained(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that is trained on TEXTS, or the one of letters."""
    if kind == "letters":
        return make_tokenizer()
    special, options = ["<s>", "</s>"], dict[str, Any](show_progress=False)
    if kind == "unigram":
        core = Tokenizer(models.Unigram())
        core.normalizer = normalizers.Sequence([])
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        core.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()])
        letters = sorted({c for text in TEXTS for c in text if c != " "})
        options |= {"unk_token": "<unk>", "initial_alphabet": letters}
        special = ["<unk>", *special]
        trainer: Any = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, **options)
    elif kind == "fallback":  # as sentencepiece writes BPE: unknown characters as bytes
        core = Tokenizer(models.BPE(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", *special], **options)
        core.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
        learnt = json.loads(core.to_str())["model"]
        numbers = learnt["vocab"] | {f"<0x{byte:02X}>": len(learnt["vocab"]) + byte for byte in range(256)}
        merges = [(first, second) for first, second in learnt["merges"]]
        core.model = models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True)
        space = decoders.Replace("\u2581", " ")
        core.decoder = decoders.Sequence(
            [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>"
        )
    else:
        core = Tokenizer(models.BPE())
        parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] * (kind == "digits")
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        core.decoder = decoders.ByteLevel()
        alphabet, size = pre_tokenizers.ByteLevel.alphabet(), {"small bytes": 290, "bos": 400}.get(kind, 360)
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, **options
        )
    core.train_from_iterator(TEXTS, trainer)
    if kind == "bos":
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@cache
def shared(student: str, teacher: str) -> SharedTokens:
    tasks = {"a": Task(kind="copy")}
    return SharedTokens(trained(student), Encoder(tasks, trained(teacher)))


def ids_of(kind: str, text: str) -> list[int]:
    return trained(kind).encode(text, add_special_tokens=False)


def joined(kind: str, first: int, second: int) -> bool:
    """True if a tokenizer writes the texts of two tokens in another way; parts of characters count as not."""
    own = token_bytes(trained(kind))
    try:
        alone, both = own[first].decode(), (own[first] + own[second]).decode()
    except UnicodeDecodeError:
        return False
    return ids_of(kind, alone) == [first] and ids_of(kind, both) != [first, second]


texts = st.one_of(
    st.text(alphabet="the cat 0123456789+=,.é東🙂", max_size=40),
    st.lists(st.sampled_from(" ".join(TEXTS).split()), max_size=12).map(" ".join),
)


@settings(max_examples=40, deadline=None)
@given(text=texts, student=st.sampled_from(KINDS), teacher=st.sampled_from(KINDS))
def test_strict_positions_cover_the_same_bytes_and_no_others_do(
    text: str, student: str, teacher: str
) -> None:
    both = shared(student, teacher)
    ids = [i for i in ids_of(student, text) if token_bytes(trained(student))[i]]
    found = both.align(ids)
    own, theirs = (token_bytes(trained(kind)) for kind in (student, teacher))
    before_own = [b"".join(own[i] for i in ids[:n]) for n in range(len(ids) + 1)]
    before_theirs = [b"".join(theirs[i] for i in found.ids[:n]) for n in range(len(found.ids) + 1)]
    extra = len(before_theirs[-1]) - len(before_own[-1])  # a space that a teacher puts before a text
    strict = {tuple(pair) for pair in found.pairs.tolist()}
    for mine, theirs_place in strict:
        assert own[ids[mine]] == theirs[found.ids[theirs_place]]
        assert len(before_own[mine]) + extra == len(before_theirs[theirs_place])
    if extra in (0, 1) and before_theirs[-1][extra:] == before_own[-1]:
        expected = {
            (i, j)
            for i in range(len(ids))
            for j in range(len(found.ids))
            if before_own[i] == before_theirs[j][extra:] * (len(before_theirs[j]) >= extra)
            and before_own[i + 1] == before_theirs[j + 1][extra:]
            and own[ids[i]] == theirs[found.ids[j]]
        }
        assert strict == expected
        spans = [(mine.start, mine.stop, other.start, other.stop) for mine, other in found.chunks]
        covered = [place for a, b, _, _ in spans for place in range(a, b)]
        assert sorted([*covered, *(mine for mine, _ in strict)]) == list(range(len(ids)))
        for a, b, c, d in spans:
            assert before_own[b][len(before_own[a]) :] == before_theirs[d][extra:][len(before_own[a]) :]
            assert (b - a, d - c) != (1, 1)


@pytest.mark.parametrize("student", KINDS)
@pytest.mark.parametrize("teacher", ["digits", "unigram", "fallback"])
def test_tokenizers_of_all_kinds_have_strict_positions(student: str, teacher: str) -> None:
    ids = ids_of(student, "the cat sat on 12 mice")
    places = shared(student, teacher).align(ids).pairs[:, 0].tolist()
    own = token_bytes(trained(student))
    assert len(places) == len(ids) if teacher == student else places
    if student in ("bytes", "bos"):  # others have letters, or other words
        assert any(b" " in own[ids[place]] for place in places)


@settings(max_examples=30, deadline=None)
@given(text=texts, kind=st.sampled_from(KINDS))
def test_a_tokenizer_shares_all_tokens_with_itself(text: str, kind: str) -> None:
    both, ids = shared(kind, kind), ids_of(kind, text)
    assert both.same
    known = [i for i in ids if token_bytes(trained(kind))[i]]
    assert torch.equal(both.to_teacher[known], torch.tensor(known, dtype=torch.int64))


@pytest.mark.parametrize("student", KINDS)
@pytest.mark.parametrize("teacher", KINDS)
def test_shared_tokens_have_equal_bytes_and_are_not_special(student: str, teacher: str) -> None:
    both = shared(student, teacher)
    own, theirs = (token_bytes(trained(kind)) for kind in (student, teacher))
    for mine, number in enumerate(both.to_teacher.tolist()):
        if mine == trained(student).eos_token_id:
            assert number == trained(teacher).eos_token_id
        elif number >= 0:
            assert own[mine] == theirs[number]
            assert mine not in trained(student).all_special_ids
            assert number not in trained(teacher).all_special_ids
    assert any(both.to_teacher >= 0)


def test_tokens_that_split_a_character_are_aligned_by_their_bytes() -> None:
    ids = ids_of("small bytes", "é東🙂")
    assert len(ids) > 3
    cut = shared("small bytes", "bytes").align(ids[:-1])  # the last character is not whole
    assert len(cut.pairs)
    assert int(cut.pairs[:, 0].max()) < len(ids) - 2


def test_digits_that_one_side_joins_are_not_compared_and_are_counted() -> None:
    both = shared("digits", "bytes")
    covered = both.coverage(ids_of("digits", "345 birds and 6789 fish"))
    assert covered.numerals == 7
    assert covered.strict_numerals < covered.numerals
    assert covered.strict > 0


def test_what_follows_a_special_token_or_is_changed_text_is_not_compared() -> None:
    both = shared("bytes", "unigram")
    ids = [*ids_of("bytes", "the cat"), trained("bytes").eos_token_id, *ids_of("bytes", "the cat")]
    whole = both.align(ids_of("bytes", "the cat"))
    assert torch.equal(both.align(ids).pairs, whole.pairs)  # pyright: ignore[reportArgumentType]
    assert len(both.align(ids_of("bytes", "a </s> b")).pairs) <= 2


def test_a_teacher_reads_its_own_prompt_and_is_asked_for_the_student_s_tokens() -> None:
    both = shared("bytes", "bos")
    prompt = Prompt(0, "a", "a", "the cat", None, {}, 0, 0)
    answer = ids_of("bytes", " sat on the mat")
    top_RK = torch.arange(len(answer) * 4).reshape(-1, 4) % 300
    row, found = both.request(prompt, "", answer, top_RK, "a row")
    assert row.ids[0] == trained("bos").bos_token_id
    assert row.ids[row.start :] == found.ids
    assert row.support is not None
    scored = Scores(torch.rand(len(found.ids)), row.support, torch.rand(row.support.shape), 1)
    back = both.scores(found, scored, len(answer), top_RK)
    assert back.topk_ids is not None
    assert back.topk_logprobs is not None
    strict = dict(found.pairs.tolist())
    assert strict
    for place in range(len(answer)):
        for k, token in enumerate(top_RK[place].tolist()):
            known = place in strict and int(both.to_teacher[token]) >= 0
            if known and (after := strict[place]):
                known = not joined("bos", found.ids[after - 1], int(both.to_teacher[token]))
            assert int(back.topk_ids[place, k]) == (token if known else -1)
            if known:
                assert back.topk_logprobs[place, k] == scored.topk_logprobs[strict[place], k]  # pyright: ignore
    chunks = {mine.stop - 1: float(scored.logprobs[other].sum()) for mine, other in found.chunks}
    expected = {mine: float(scored.logprobs[place]) for mine, place in strict.items()} | chunks
    assert {i: x for i, x in enumerate(back.logprobs.tolist()) if x} == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="abcde", min_size=1, max_size=8))
def test_only_tokens_that_the_teacher_could_write_next_are_compared(text: str) -> None:
    numbers = make_tokenizer().get_vocab()
    numbers |= {pair: len(numbers) + i for i, pair in enumerate(JOINED)}
    core = Tokenizer(models.BPE(numbers, [(pair[0], pair[1]) for pair in JOINED], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    teacher = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    both = SharedTokens(make_tokenizer(), Encoder({"a": Task(kind="copy")}, teacher))
    ids = make_tokenizer().encode(text, add_special_tokens=False)
    letters = make_tokenizer().encode("abcde", add_special_tokens=False)
    top_RK = torch.tensor([letters] * len(ids))
    _, found = both.request(Prompt(0, "a", "a", "x", None, {}, 0, 0), "", ids, top_RK, "a row")
    assert found.support is not None
    for (mine, place), row in zip(found.pairs.tolist(), found.support.tolist(), strict=True):
        for letter, token in zip("abcde", row, strict=True):
            asked = teacher.encode(text[:mine] + letter, add_special_tokens=False)
            assert (token >= 0) == (asked == [*found.ids[:place], *teacher.encode(letter)])


@pytest.mark.parametrize("thinks", [False, True])
def test_check_shows_a_prompt_as_the_teacher_s_template_renders_it(thinks: bool) -> None:
    teacher = copy.deepcopy(trained("bytes"))
    mode = "{% if enable_thinking is defined %}think{% endif %}" if thinks else ""
    teacher.chat_template = "<q>{{ messages[0].content }}<a>" + mode
    student = copy.deepcopy(trained("bytes"))
    student.chat_template = "<s>{{ messages[0].content }}<a>"
    sections = {
        "name": "r",
        "model": {"random_init": {}},
        "distill": {"signal": "shared"},
        "route": {"by": "task"},
    }
    teachers = {"far": {"model": "a"}, "near": {"model": "b"}, "served": {"url": "http://a/v1", "model": "c"}}
    tasks = {"plain": {"kind": "copy"}, "chats": {"kind": "copy", "chat": True}}
    recipe = Recipe.model_validate(sections | {"tasks": tasks, "teachers": teachers})
    far = SharedTokens(student, Encoder(recipe.tasks, teacher))
    words, (line,) = renderings(recipe, student, {"far": far})
    thinking = ", can think" if thinks else ""
    assert words == {"far": f"other{thinking}", "near": "same", "served": "unknown"}
    assert line.startswith("teacher far reads")
    assert line.index("'<q>copy:") < line.index("'<s>copy:")
    assert ("thinking" in line) == thinks
    student.chat_template = teacher.chat_template
    words, lines = renderings(recipe, student, {"far": far})
    assert words == {"far": f"same{thinking}", "near": f"same{thinking}", "served": "unknown"}
    assert lines == []
    plain = recipe.model_copy(update={"tasks": {"plain": recipe.tasks["plain"]}})
    assert renderings(plain, student, {"far": far}) == ({}, []), "prompts without a template"


@pytest.mark.parametrize("chat", [False, True])
def test_the_tokens_that_end_an_answer_are_compared_if_all_before_is_aligned(chat: bool) -> None:
    teacher, ids = copy.deepcopy(trained("bytes")), ids_of("letters", "the cat")
    teacher.add_special_tokens({"additional_special_tokens": ["<end>"]})  # pyright: ignore[reportArgumentType]
    teacher.chat_template = "{% for m in messages %}<q>{{ m.content }}<end>{% endfor %}"
    both = SharedTokens(trained("letters"), Encoder({"a": Task(kind="copy", chat=chat)}, teacher))
    end, own_end = teacher.convert_tokens_to_ids("<end>" if chat else "</s>"), trained("letters").eos_token_id
    assert isinstance(end, int)
    assert isinstance(own_end, int)
    found = both.align([*ids, own_end])
    assert found.ids == [*ids_of("bytes", "the cat"), end]
    assert found.pairs[-1].tolist() == [len(ids), len(found.ids) - 1]
    assert both.to_teacher[own_end] == end
    assert both.coverage([*ids, own_end]) == both.coverage(ids)
    for changed in (ids, [*ids, own_end, *ids], [*ids, own_end, own_end]):
        assert end not in both.align(changed).ids


def test_word_pieces_are_refused(tmp_path: Path) -> None:
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(RecipeError) as caught:
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]"))
    assert caught.value.path == "distill.signal"


def test_the_end_after_a_cut_character_is_not_compared() -> None:
    both, end = shared("small bytes", "bos"), trained("small bytes").eos_token_id
    assert isinstance(end, int)
    cut = token_bytes(trained("small bytes")).index("é".encode()[:1])
    whole = both.align([*ids_of("small bytes", "cat"), end])
    found = both.align([*ids_of("small bytes", "cat"), cut, end])
    assert len(whole.pairs) > len(found.pairs)
    assert whole.ids == [*found.ids, trained("bos").eos_token_id]
