"""Data files as users have them, and as they should not be."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

_VALUES: tuple[Any, ...] = (
    "a", "", "1+1=", "é\u0301\u200b", "\ud800", "x" * 100, None, True, 3, -1.5, float("nan"), 10**400,
    [], {}, [1], ["a", "b"], {"a": 1}, [{"role": "user", "content": "hi"}], [{"role": "user"}],
    [{"role": "x", "content": "y"}], [{"role": "user", "content": [{"type": "text", "text": "t"}]}],
    [{"role": "assistant", "content": "only"}],
    "\n", "\u0000", " ",
)  # fmt: skip
_COLUMNS = ("prompt", "answer", "images", "domain", "Prompt", "question", "", "prompt ", "weight")


def draw_file(rng: random.Random, folder: Path) -> Path:
    """A file of a random format with rows of random values; some are damaged."""
    rows = [_row(rng) for _ in range(rng.choice([0, 1, 2, 5, 20]))]
    if rng.random() < 0.4:  # all are alike, as most people's are
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(2 + len(rows))]
        if rng.random() < 0.6:
            rng.choice(rows)[rng.choice(_COLUMNS)] = rng.choice(_VALUES)
    kind = rng.choice(["jsonl", "jsonl", "json", "csv", "parquet", "txt", "jsonl.gz"])
    data = _encoded(rows, kind, rng)
    if rng.random() < 0.35:
        data = _damaged(data, rng)
    path = folder / f"data.{kind}"
    path.write_bytes(data)
    return path


def _row(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return rng.choice(_VALUES)
    names = ["prompt", "answer"] if rng.random() < 0.7 else rng.sample(_COLUMNS, rng.randint(0, 4))
    return {name: rng.choice(_VALUES) for name in names}


def _encoded(rows: list[Any], kind: str, rng: random.Random) -> bytes:
    mappings = [row for row in rows if isinstance(row, dict)]
    if kind == "csv":
        columns = list(dict.fromkeys(name for row in mappings for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns or ["prompt"], delimiter=rng.choice([",", ",", ";", "\t"]))
        writer.writeheader()
        writer.writerows({k: v for k, v in row.items() if k in columns} for row in mappings)
        return text.getvalue().encode(errors="surrogatepass")
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        names = list(dict.fromkeys(name for row in mappings for name in row)) or ["prompt"]
        texts = {n: [json.dumps(row.get(n)) if n in row else None for row in mappings] for n in names}
        pyarrow.parquet.write_table(pyarrow.table(texts), buffer)
        return buffer.getvalue()
    escape = rng.random() < 0.5
    if kind == "json":
        whole: Any = rng.choice([rows, {"data": rows}, rows and rows[0]])
        return json.dumps(whole, ensure_ascii=escape).encode(errors="surrogatepass")
    lines = [json.dumps(row, ensure_ascii=escape) for row in rows]
    return "\n".join([*lines, ""]).encode(errors="surrogatepass")


def _damaged(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        [
            data[:at],
            data[:at] + bytes(rng.randrange(256) for _ in range(4)) + data[at:],
            b"\xef\xbb\xbf" + data,
            data.decode(errors="replace").encode("utf-16"),
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\n\n"),
            b"[" * 20_000 + data,
            data + b"{" * 20_000,
            bytes(rng.randrange(256) for _ in range(300)),
        ]
    )
