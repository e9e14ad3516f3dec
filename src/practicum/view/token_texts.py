"""The text of single tokens, by the run's tokenizer file. Bytes that are no whole character stay visible."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TokenTexts:
    """Texts of token ids; special tokens are marked."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._special = {
            number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._is_bytes = '"ByteLevel"' in json.dumps(
            json.loads(path.read_text(encoding="utf-8")).get("decoder")
        )

    def __call__(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Each token with its id, text and whether it is special."""
        return [
            {"id": number, "text": self._text(number), "special": number in self._special} for number in ids
        ]

    def _text(self, number: int) -> str:
        token = self._tokenizer.id_to_token(number)
        if token is None:
            return f"<{number}>"
        if number in self._special:
            return token
        if not self._is_bytes:
            return token.replace("▁", " ")
        table = byte_table()
        data = bytes(table[c] for c in token if c in table)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)


@lru_cache(1)
def byte_table() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def tokenizer_file(run: Path) -> Path | None:
    """The tokenizer of a run: its own file, else that of its export or of a checkpoint."""
    checkpoints = sorted((run / "checkpoints").glob("step-*/model/tokenizer.json"))
    for path in (run / "tokenizer.json", run / "export" / "tokenizer.json", *checkpoints[-1:]):
        if path.is_file():
            return path
    return None
