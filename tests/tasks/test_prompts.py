"""Prompts become plain lists of ints and pictures, with real tokenizers and a real processor."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from practicum.errors import DataError, PracticumError, RecipeError
from practicum.models.processor import Processor, make_processor, make_vision_tokenizer
from practicum.models.tokenizer import make_tokenizer
from practicum.tasks.messages import picture_message
from practicum.tasks.pictures import Picture, Shape, open_picture
from practicum.tasks.prompts import Encoded, Prompt, demonstrated_turn, demonstration, encode_prompt

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
    encoded = encode_prompt(prompt("sort:31="), tokenizer, chat=False, system=None)
    ids = encoded.ids
    assert encoded.messages is None
    assert encoded.images is None
    assert type(ids) is list
    assert all(type(i) is int for i in ids)
    assert len(ids) == 8
    assert tokenizer.decode(ids) == "sort:31="


def test_bos_is_added_if_the_tokenizer_adds_it_and_eos_never():
    assert encode_prompt(prompt("ab"), closing_tokenizer(), False, None).ids == [0, 3, 4]
    assert encode_prompt(prompt("<s>ab"), closing_tokenizer(), False, None).ids == [0, 3, 4]


def test_messages_go_through_the_chat_template():
    tokenizer = make_tokenizer()
    encoded = encode_prompt(prompt(CHAT), tokenizer, chat=False, system=None)
    ids = encoded.ids
    assert encoded.messages == CHAT
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == "<user>ab<assistant>c<eos><user>d<assistant>"


def test_strings_become_a_user_message_behind_the_system_message():
    tokenizer = make_tokenizer()
    encoded = encode_prompt(prompt("ab"), tokenizer, chat=True, system="be kind")
    assert encoded.messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "ab"}]
    assert tokenizer.decode(encoded.ids) == "<system>be kind<user>ab<assistant>"


def test_messages_keep_their_own_system_message():
    tokenizer = make_tokenizer()
    own = [{"role": "system", "content": "mine"}, *CHAT[:1]]
    encoded = encode_prompt(prompt(own), tokenizer, chat=False, system="be kind")
    assert tokenizer.decode(encoded.ids) == "<system>mine<user>ab<assistant>"


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


def test_schemas_of_tools_reach_the_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}:"
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    encoded = encode_prompt(prompt(CHAT), tokenizer, False, None, tools=[schema])
    assert tokenizer.decode(encoded.ids) == "add :"
    assert tokenizer.decode(encode_prompt(prompt(CHAT), tokenizer, False, None).ids) == ":"


PICTURE = Picture(16, 24, 100, (Shape(2, 3, 8, "disc", "red"),))


@pytest.fixture(scope="module")
def processor() -> Processor:
    return make_processor(make_vision_tokenizer())


def encode(content: Any, processor: Processor | None) -> Encoded:
    return encode_prompt(prompt(content), make_vision_tokenizer(), False, None, processor=processor)


def test_pictures_come_with_as_many_image_tokens_as_they_need(processor):
    encoded = encode([picture_message([PICTURE, PICTURE], "colour=")], processor)
    shown = "<|vision_start|>" + 6 * "<|image_pad|>" + "<|vision_end|>"
    assert make_vision_tokenizer().decode(encoded.ids) == f"<user>{shown}{shown}colour=<assistant>"
    assert encoded.images is not None
    assert encoded.images.grid.tolist() == [[1, 6, 4], [1, 6, 4]]


def test_pictures_for_a_text_model_are_a_mistake_of_the_recipe():
    with pytest.raises(RecipeError, match=r"model\.path: .*not a vision model.*2 images(.|\n)*qwen2_5_vl"):
        encode([picture_message([PICTURE, PICTURE], "colour=")], None)


def test_a_missing_picture_names_row_path_and_fix(processor, tmp_path):
    path = str(tmp_path / "gone.png")
    with pytest.raises(DataError, match=rf"prompt 3 .*row 3.*{path} does not exist; paths are relative"):
        encode([picture_message([path], "colour=")], processor)


def test_an_unreadable_picture_names_row_path_and_fix(processor, tmp_path):
    PICTURE.draw().save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    for n, broken in enumerate((b"", b"not a picture", whole[: len(whole) // 2])):
        path = tmp_path / f"{n}.png"
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"prompt 3 .*{path} can't be read: .*; save it again as PNG"):
            encode([picture_message([str(path)], "colour=")], processor)


def test_a_picture_of_a_shape_that_the_model_refuses_is_a_bad_row(processor):
    strip = Picture(900, 3, 0, ())
    with pytest.raises(DataError, match=r"prompt 3 .*aspect ratio"):
        encode([picture_message([strip], "colour=")], processor)


def test_a_text_that_forges_a_place_for_a_picture_is_a_bad_row(processor):
    with pytest.raises(DataError, match=r"has 1 images, and the chat template made 2 places.*must not say"):
        encode([picture_message([PICTURE], "<|image_pad|>")], processor)


def test_turned_photos_are_read_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: the camera was held on its side
    PICTURE.draw().save(tmp_path / "turned.jpg", exif=exif)
    assert open_picture(str(tmp_path / "turned.jpg")).size == (24, 16)


def test_demonstrations_are_answers_as_text():
    assert demonstration(prompt("p", "abc")) == "abc"
    assert demonstration(prompt("p", 42)) == "42"
    with pytest.raises(DataError, match=r"prompt 3 .*has no SFT example.*None"):
        demonstration(prompt("p", None))


def test_the_demonstrator_of_a_file_task_gives_the_answer():
    assert demonstrated_turn(prompt("p", 42), [{"role": "user", "content": "p"}]) == "42"
