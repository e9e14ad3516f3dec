"""A character tokenizer, made from code, for the tiny models."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/=<>:,.?!|#()[]\n"
SPECIALS = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>", "<tool>")
_CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character, plus end, padding, unknown and chat-role tokens."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *characters))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[3:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT
    return tokenizer
