"""Tokens that a student and a teacher with another tokenizer have in common.

Texts are aligned by their bytes. A position is strict if one token of the student covers the same bytes as
one token of the teacher. There the student's most likely tokens are compared, as far as the teacher has them:
tokens of equal bytes, special tokens left out. Tokens that the teacher would join with the one before are
left out too: it never sees them there, and so finds them unlikely even where they are right. At all other
positions the teacher says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerBase

from practicum.dataplane.fields import NO_MATCH, NUMERAL, SHARED_TOKEN
from practicum.engines.protocol import ScoreRequest, Scores
from practicum.errors import RecipeError, TeacherError
from practicum.observe.text import BYTE_LETTERS
from practicum.recipe.schema.recipe import Recipe
from practicum.sessions.chat import make_encoder
from practicum.tasks.prompts import Encoder, Prompt
from practicum.teachers.vocabulary import compare_vocabularies, load_teacher_tokenizer

_PAIRS = 1 << 18
"""Number of pairs of tokens that are remembered with whether the teacher joins them."""
ANCHOR = "\n"
"""Text before an answer when it is tokenised: some tokenizers treat the start of a text in another way."""
LEAST_MASS = 0.5
"""Least mass of a teacher on the compared tokens, as a mean over the positions where it is compared."""
_SPACE, _ANSWER = "\u2581", "xyzzy"


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes of each token. Special tokens have none. Supports byte-level, SentencePiece and
    plain-text vocabularies. Raise RecipeError for others."""
    backend: Any = tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
    if "WordPiece" in decoder or "BPEDecoder" in decoder:
        expected = "a byte-level or sentencepiece tokenizer, or one of plain text"
        raise RecipeError("distill.signal", "shared with a tokenizer of word pieces", expected)
    special, added = special_texts(tokenizer), {token.content for token in _added(tokenizer)}
    found = [b""] * len(tokenizer)
    for token, number in tokenizer.get_vocab().items():
        if token in special or number >= len(found):
            continue
        if token in added:
            found[number] = token.encode()
        elif "ByteLevel" in decoder:
            found[number] = (
                bytes(BYTE_LETTERS[c] for c in token) if BYTE_LETTERS.keys() >= set(token) else b""
            )
        elif "ByteFallback" in decoder and len(token) == 6 and token.startswith("<0x"):
            found[number] = bytes([int(token[3:5], 16)])
        else:
            found[number] = (token.replace(_SPACE, " ") if _SPACE in decoder else token).encode()
    return found


def end_token(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> int | None:
    """Return the token that ends an answer: the one that the chat template writes, or the end of a text."""
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(_ANSWER)[2]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return next((int(i) for i in ids if i in tokenizer.all_special_ids), None)
    return tokenizer.eos_token_id  # pyright: ignore[reportReturnType]


def special_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts of special tokens."""
    return {*tokenizer.all_special_tokens, *(token.content for token in _added(tokenizer) if token.special)}


def _added(tokenizer: PreTrainedTokenizerBase) -> list[AddedToken]:
    return list(tokenizer.added_tokens_decoder.values())  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class Alignment:
    """An answer as the teacher's tokens, and the pairs of places (student's, teacher's) that are strict."""

    ids: list[int]
    pairs: Tensor
    """[n, 2]"""
    chunks: Sequence[tuple[slice, slice]] = ()
    """The other places (student's, teacher's) between two ends that both tokenizers have."""
    support: Tensor | None = None
    """Of each pair the teacher's tokens that are compared [n, K], -1 where it has none."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of a text's tokens: of all of them and of those with a digit, how many are strict."""

    tokens: int = 0
    strict: int = 0
    numerals: int = 0
    strict_numerals: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        mine, theirs = ((c.tokens, c.strict, c.numerals, c.strict_numerals) for c in (self, other))
        return Coverage(*map(sum, zip(mine, theirs, strict=True)))

    @property
    def share(self) -> float:
        return self.strict / max(1, self.tokens)

    @property
    def numeral_share(self) -> float:
        return self.strict_numerals / self.numerals if self.numerals else 1.0


class SharedTokens:
    """A student's tokens in the words of a teacher. `encode` encodes prompts as the teacher reads them."""

    def __init__(self, student: PreTrainedTokenizerBase, encode: Encoder) -> None:
        self.student, self.encode, self.teacher = student, encode, encode.tokenizer
        self._own, self._theirs = token_bytes(student), token_bytes(self.teacher)
        self._special = special_texts(self.teacher)
        vocabulary = self.teacher.get_vocab()
        by_bytes: dict[bytes, int] = {}
        # Of tokens with equal bytes the lowest, and a token rather than the byte that a fallback writes.
        for _, number in sorted(vocabulary.items(), key=lambda x: (not x[0].startswith("<0x"), -x[1])):
            if number < len(self._theirs) and (theirs := self._theirs[number]):
                by_bytes[theirs] = number
        self.to_teacher = torch.tensor([by_bytes.get(own, -1) if own else -1 for own in self._own])
        """The teacher's token of each of the student's, -1 where it has none."""
        chat = any(task.chat for task in encode.tasks.values())
        self._ends = [end_token(tokenizer, chat=chat) for tokenizer in (student, self.teacher)]
        if (own_end := self._ends[0]) is not None and (their_end := self._ends[1]) is not None:
            self.to_teacher[own_end] = their_end
        self._joins = lru_cache(_PAIRS)(self._would_join)

    @cached_property
    def same(self) -> bool:
        """True if both have the same tokens, so that scores are exchanged by token id."""
        chat = any(task.chat for task in self.encode.tasks.values())
        return not compare_vocabularies(self.student, self.teacher, "", chat=chat)

    def align(self, response: Sequence[int]) -> Alignment:
        """Return the alignment of an answer, up to a special token or a character that is cut. The tokens
        that end an answer are a pair, if all that precedes is aligned."""
        own = [self._own[i] for i in response]
        until = next((i for i, part in enumerate(own) if not part), len(own))
        whole = b"".join(own[:until])
        text = _valid(whole)
        specials = [text.find(special) for special in self._special if special in text]
        text = text[: min(specials, default=len(text))]
        ids = self._tokenise(text)
        theirs = [self._theirs[i] for i in ids]
        their_spans = _spans(theirs)
        spans = {span: place for place, span in enumerate(their_spans)}
        shift = sum(map(len, theirs)) - len(text.encode())
        if b"".join(theirs)[shift:] != text.encode():  # a tokenizer that changes the text
            return Alignment(ids, torch.empty(0, 2, dtype=torch.int64))
        mine = [(start + shift, end + shift) for start, end in _spans(own[:until])]
        pairs = [(place, spans[span]) for place, span in enumerate(mine) if span in spans]
        ends = {0: 0} | {end: place for place, (_, end) in enumerate(their_spans, 1)}
        common = [(place, ends[end]) for place, (_, end) in enumerate([(0, shift), *mine]) if end in ends]
        chunks = [
            (slice(a, b), slice(c, d)) for (a, c), (b, d) in pairwise(common) if (b - a, d - c) != (1, 1)
        ]
        if None not in self._ends and list(response[until:]) == self._ends[:1] and text.encode() == whole:
            pairs.append((until, len(ids)))
            ids = [*ids, *self._ends[1:]]
        return Alignment(ids, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2), chunks)

    def coverage(self, response: Sequence[int]) -> Coverage:
        """Count the tokens of a response, without special ones."""
        strict = set(self.align(response).pairs[:, 0].tolist())
        texts = [place for place, token in enumerate(response) if self._own[token]]
        strict &= set(texts)
        numerals = [place for place in texts if self._numeral(response[place])]
        return Coverage(len(texts), len(strict), len(numerals), sum(place in strict for place in numerals))

    def match(self, found: Alignment, response: Sequence[int]) -> Tensor:
        """Return the field teacher_match of a row."""
        match_R = torch.tensor([NUMERAL if self._numeral(token) else NO_MATCH for token in response]).long()
        match_R[found.pairs[:, 0]] += SHARED_TOKEN
        return match_R

    def _numeral(self, token: int) -> bool:
        return any(48 <= byte < 58 for byte in self._own[token])

    def _tokenise(self, text: str) -> list[int]:
        """Return the teacher's tokens of a text that follows other text."""

        def ids_of(part: str) -> list[int]:
            return [int(i) for i in self.teacher(part, add_special_tokens=False)["input_ids"]]

        ids, anchor = ids_of(ANCHOR + text), ids_of(ANCHOR)
        return ids[len(anchor) :] if text and ids[: len(anchor)] == anchor else ids_of(text) if text else []

    def request(
        self, prompt: Prompt, before: str, response: Sequence[int], top_RK: Tensor | None, name: str
    ) -> tuple[ScoreRequest, Alignment]:
        """Return the request to the teacher for a response. `top_RK` are the student's most likely tokens."""
        found = self.align(response)
        asked = (
            [int(i) for i in self.teacher(before, add_special_tokens=False)["input_ids"]] if before else []
        )
        asked += self.encode(prompt).ids
        support = None
        if top_RK is not None:
            mine, theirs = found.pairs.unbind(1)
            known_NK = self._support(found.ids, theirs, self.to_teacher[top_RK[mine]])
            support = torch.zeros(len(found.ids), top_RK.shape[1], dtype=torch.int64)
            support[theirs] = known_NK.clamp_min(0)
            found = replace(found, support=known_NK)
        return ScoreRequest([*asked, *found.ids], len(asked), name, support=support), found

    def _support(self, ids: Sequence[int], places: Tensor, tokens_NK: Tensor) -> Tensor:
        """Return these tokens of the teacher, -1 for those that it would join with the one before."""
        rows = zip(places.tolist(), tokens_NK.tolist(), strict=True)
        kept = [
            [-1 if t < 0 or (place and self._joins(ids[place - 1], t)) else t for t in row]
            for place, row in rows
        ]
        return torch.tensor(kept, dtype=torch.int64).reshape(tokens_NK.shape)

    def _would_join(self, first: int, second: int) -> bool:
        """Return True if the teacher's tokenizer never writes these two tokens one after the other. Adjacent
        pairs decide which sequences of tokens BPE can write."""
        try:
            alone = self._theirs[first].decode()
            both = (self._theirs[first] + self._theirs[second]).decode()
        except UnicodeDecodeError:  # parts of characters: unknown
            return False
        is_text = alone != both  # the token that ends an answer is not
        return is_text and self._tokenise(alone) == [first] and self._tokenise(both)[:-1] != [first]

    def scores(self, found: Alignment, scores: Scores, length: int, top_RK: Tensor | None) -> Scores:
        """Return the teacher's scores at the student's positions and of its tokens, -1 where it has none. The
        last position of a mismatched chunk has the logprob of the whole chunk, the others 0."""
        mine, theirs = found.pairs.unbind(1)
        logprobs_R = torch.zeros(length)
        logprobs_R[mine] = scores.logprobs[theirs]
        for own, other in found.chunks:
            logprobs_R[own.stop - 1] = scores.logprobs[other].sum()
        ids_RK = best_RK = None
        if top_RK is not None:
            assert scores.topk_logprobs is not None
            assert found.support is not None
            ids_RK, best_RK = torch.full_like(top_RK, -1), torch.zeros(top_RK.shape)
            shared = found.support >= 0
            ids_RK[mine] = top_RK[mine].masked_fill(~shared, -1)
            best_RK[mine] = scores.topk_logprobs[theirs].masked_fill(~shared, 0.0)
        return Scores(logprobs_R, ids_RK, best_RK, scores.version)


def require_mass(name: str, mass: float) -> None:
    """Raise a TeacherError if a teacher has too little mass on the tokens that it is compared on."""
    if mass < LEAST_MASS:
        raise TeacherError(
            f"teacher {name} has {mass:.0%} of its mass on the tokens that it is compared on (the student's "
            f"most likely ones, if it has them), expected at least {LEAST_MASS:.0%}\n  → take a teacher with "
            "a tokenizer more like the student's, raise distill.top_k, or train on its answers first"
        )


def shared_tokens(recipe: Recipe, student: PreTrainedTokenizerBase) -> dict[str, SharedTokens]:
    """Return the shared tokens of each teacher with another tokenizer, or {} if the recipe compares by id."""
    if recipe.distill is None or recipe.distill.signal != "shared":
        return {}
    found = {}
    for name, teacher in recipe.teachers.items():
        tokenizer = load_teacher_tokenizer(teacher, f"teachers.{name}")
        if tokenizer is None:
            continue
        shared = SharedTokens(student, make_encoder(recipe, tokenizer))
        if shared.encode.processor is not None:
            what, expected = "shared with a student that sees pictures", "top_k, sampled or full"
            raise RecipeError("distill.signal", what, expected)
        if not shared.same:
            found[name] = shared
    return found


def _spans(parts: Sequence[bytes]) -> list[tuple[int, int]]:
    ends = list(accumulate(map(len, parts)))
    return list(zip([0, *ends[:-1]], ends, strict=True)) if parts else []


def _valid(text: bytes) -> str:
    """Return the longest beginning that is UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
