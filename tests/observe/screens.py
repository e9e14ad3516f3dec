"""A real pseudo-terminal whose output a terminal emulator turns into the screen that a person sees."""

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pyte


class Terminal:
    """The user's side of a pseudo-terminal of `columns` by `rows`."""

    def __init__(self, columns: int, rows: int = 40) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.file: IO[str] = os.fdopen(slave, "w", encoding="utf-8")
        self.raw = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other side was closed
                return
            if not data:
                return
            self.raw += data
            self._stream.feed(data)

    def close(self) -> None:
        """Close the program's side and read what is left."""
        if not self.file.closed:
            self.file.close()
            self._reader.join(10)
            os.close(self.master)

    @property
    def lines(self) -> list[str]:
        """What is on the screen after `close`, without the empty lines at the end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines


@contextmanager
def terminal(columns: int, rows: int = 40) -> Iterator[Terminal]:
    """A terminal that is closed at the end; its screen may be read after that."""
    opened = Terminal(columns, rows)
    try:
        yield opened
    finally:
        opened.close()
