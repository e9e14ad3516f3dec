"""Packs as chunks of bytes, and chunks as packs again.

A chunk holds all columns of some consecutive rows of a put, because TransferQueue's cost grows with rows ×
fields, not with bytes. Its first bytes say which chunk it is: TransferQueue can return the bytes of another
put if a slot was cleared and reused during a read.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from practicum.dataplane.check_columns import dtype_of
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.ragged import Ragged
from practicum.dataplane.ray_store.column_packing import OpenPack, pack_bytes
from practicum.dataplane.ray_store.row_locations import Pack, PackedColumn
from practicum.dataplane.transferqueue.tq_client import ChunkMissing
from practicum.errors import StoreError

CHUNK_BYTES = 512 * 2**10
"""Bytes that a chunk may have: smaller chunks cost time for each, larger ones are read in vain."""

_ALIGN = 64
# The put's id and the chunk's number, the size of chunk and header in bytes, the header's checksum.
_BEGIN = struct.Struct("<16sIQQI")


class ChunkedPut(NamedTuple):
    """Where a put is: its id, and the first row of each of its chunks."""

    uid: bytes
    starts: tuple[int, ...]

    def chunks(self) -> list[Chunk]:
        """All chunks of the put."""
        return [Chunk(self.uid, i) for i in range(len(self.starts))]

    def place(self, row: int) -> tuple[Chunk, int]:
        """In which chunk a row is, and the row there."""
        number = bisect_right(self.starts, row) - 1
        return Chunk(self.uid, number), row - self.starts[number]


class Chunk(NamedTuple):
    """One chunk of a put."""

    uid: bytes
    number: int

    @property
    def name(self) -> str:
        """Its key in TransferQueue, never used for another chunk."""
        return f"{self.uid.hex()}-{self.number}"


def cut_into_chunks(pack: Pack, rows: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[ChunkedPut, Ragged]:
    """Cut a put of `rows` rows into chunks: where they will be, and their bytes."""
    sizes = _row_bytes(pack, rows)
    starts, filled = [0], 0
    for row, size in enumerate(sizes):
        if filled and filled + size > chunk_bytes:
            starts.append(row)
            filled = 0
        filled += size
    put = ChunkedPut(uuid4().bytes, tuple(starts))
    opened = OpenPack(pack)
    bounds = zip(starts, [*starts[1:], rows], strict=True)
    return put, _lay_out(put.uid, [_rows_of(opened, i, j) for i, j in bounds])


def read_chunk(chunk: Chunk, data: Tensor) -> Pack:
    """The pack in a chunk, as views; `ChunkMissing` if the bytes are those of another one."""
    view = data.numpy().data
    if len(view) < _BEGIN.size:
        raise StoreError(f"TransferQueue gave {len(view)} bytes for a chunk, which is too few")
    uid, number, size, head, checksum = _BEGIN.unpack_from(view)
    if (uid, number) != chunk:
        raise ChunkMissing([chunk.name])
    header = view[_BEGIN.size : _BEGIN.size + head]
    if size != len(view) or zlib.crc32(header) != checksum:
        raise StoreError(f"TransferQueue gave {len(view)} bytes for chunk {chunk.name}, and they are damaged")
    at, buffers = _aligned(_BEGIN.size + head), []
    sizes, plain = pickle.loads(header)
    for nbytes in sizes:
        buffers.append(view[at : at + nbytes])
        at = _aligned(at + nbytes)
    return pickle.loads(plain, buffers=buffers)


def _row_bytes(pack: Pack, rows: int) -> list[int]:
    """Bytes of tensors in each row."""
    sizes = [0] * rows
    for name, column in pack.columns.items():
        if isinstance(column, PackedColumn):
            field = FIELDS[name]
            width = dtype_of(field).itemsize * prod(column.trailing)
            lengths = pack.lengths[field.extent] if field.extent != "scalar" else [1] * rows
            sizes = [size + width * n for size, n in zip(sizes, lengths, strict=True)]
        else:
            objects = (pack_bytes(Pack({}, {name: [value]})) for value in column)
            sizes = [size + n for size, n in zip(sizes, objects, strict=True)]
    return sizes


def _rows_of(opened: OpenPack, first: int, end: int) -> Pack:
    """The part of a pack that has rows first … end - 1, as views."""
    columns: dict[str, PackedColumn | list[Any]] = {}
    for name, column in opened.pack.columns.items():
        if isinstance(column, PackedColumn):
            columns[name] = opened.piece(FIELDS[name], first, end)
        else:
            columns[name] = column[first:end]
    return Pack({extent: n[first:end] for extent, n in opened.pack.lengths.items()}, columns)


def _lay_out(uid: bytes, packs: Sequence[Pack]) -> Ragged:
    """The bytes of chunks one after the other."""
    heads: list[bytes] = []
    bodies: list[list[memoryview]] = []
    sizes: list[int] = []
    for pack in packs:
        buffers: list[pickle.PickleBuffer] = []
        plain = pickle.dumps(pack, protocol=5, buffer_callback=buffers.append)
        bodies.append([buffer.raw() for buffer in buffers])
        heads.append(pickle.dumps(([len(body) for body in bodies[-1]], plain)))
        size = _aligned(_BEGIN.size + len(heads[-1]))
        sizes.append(size + sum(_aligned(len(body)) for body in bodies[-1]))
    laid = torch.empty(sum(sizes), dtype=torch.uint8)
    view, begin = laid.numpy().data, 0
    for number, (head, body, size) in enumerate(zip(heads, bodies, sizes, strict=True)):
        _BEGIN.pack_into(view, begin, uid, number, size, len(head), zlib.crc32(head))
        at = begin + _BEGIN.size
        view[at : at + len(head)] = head
        at = begin + _aligned(_BEGIN.size + len(head))
        for part in body:
            view[at : at + len(part)] = part
            at += _aligned(len(part))
        begin += size
    return Ragged.packed(laid, sizes)


def _aligned(size: int) -> int:
    """Where the next bytes may begin: tensors of any type are read in place."""
    return -(-size // _ALIGN) * _ALIGN
