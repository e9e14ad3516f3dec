"""Prompts become plain lists of ints, with real tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from practicum.errors import DataError, PracticumError
from practicum.models.tokenizer import make_tokenizer
from practicum.tasks.prompts import Prompt, demonstration, encode_prompt, prompt_text

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]


def prompt(content: Any, answer: Any = "x") -> Prompt:
    return Prompt(3, "t", "t", content, answer, {}, 0, 3)


def closing_tokenizer() -> PreTrainedTokenizerFast:
    """Puts BOS before and EOS after every text, as some real tokenizers do."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_plain_text_is_tokenised_as_it_is():
    tokenizer = make_tokenizer()
    ids = encode_prompt(prompt("sort:31="), tokenizer, chat=False, system=None)
    assert type(ids) is list
    assert all(type(i) is int for i in ids)
    assert len(ids) == 8
    assert tokenizer.decode(ids) == "sort:31="


def test_bos_is_added_if_the_tokenizer_adds_it_and_eos_never():
    assert encode_prompt(prompt("ab"), closing_tokenizer(), False, None) == [0, 3, 4]
    assert encode_prompt(prompt("<s>ab"), closing_tokenizer(), False, None) == [0, 3, 4]


def test_messages_go_through_the_chat_template():
    tokenizer = make_tokenizer()
    ids = encode_prompt(prompt(CHAT), tokenizer, chat=False, system=None)
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == "<user>ab<assistant>c<eos><user>d<assistant>"


def test_strings_become_a_user_message_behind_the_system_message():
    tokenizer = make_tokenizer()
    ids = encode_prompt(prompt("ab"), tokenizer, chat=True, system="be kind")
    assert tokenizer.decode(ids) == "<system>be kind<user>ab<assistant>"


def test_messages_keep_their_own_system_message():
    tokenizer = make_tokenizer()
    own = [{"role": "system", "content": "mine"}, *CHAT[:1]]
    ids = encode_prompt(prompt(own), tokenizer, chat=False, system="be kind")
    assert tokenizer.decode(ids) == "<system>mine<user>ab<assistant>"


def test_no_chat_template_is_an_error_with_a_way_out():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(PracticumError, match=r"no chat template.*\n.*tasks\.t\.chat: false"):
        encode_prompt(prompt("ab"), tokenizer, chat=True, system=None)


def test_a_template_that_refuses_is_an_error_that_says_why():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PracticumError, match=r"prompt 3 .*\(user\): roles must alternate"):
        encode_prompt(prompt("ab"), tokenizer, chat=True, system=None)


def test_a_prompt_without_tokens_is_an_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = " "
    with pytest.raises(PracticumError, match=r"prompt 3 .* has no tokens"):
        encode_prompt(prompt(""), tokenizer, chat=False, system=None)


def test_texts_for_people():
    assert prompt_text("plain") == "plain"
    assert prompt_text(CHAT) == "user: ab\nassistant: c\nuser: d"


def test_demonstrations_are_answers_as_text():
    assert demonstration(prompt("p", "abc")) == "abc"
    assert demonstration(prompt("p", 42)) == "42"
    with pytest.raises(DataError, match=r"prompt 3 .*can't be demonstrated.*None"):
        demonstration(prompt("p", None))
