"""Runs the program on its standard input within limits: python sandbox.py NAME=LIMIT… OWNER.

A script of the child process. It imports nothing of practicum, and little else: each call starts it anew.
What holds the program here, inside of bubblewrap or without it:
- the kernel's resource limits: CPU time, memory, file size, open files, processes, no core dump;
- on Linux it dies with its parent, and (x86-64, arm64) a system call filter refuses new processes, threads
  and sockets, signals to others, their priorities and processors, named pipes, devices and shared memory;
- an audit hook: no reads outside of the folder and Python's library, no writes outside of the folder, and in
  Python's words what the filter refuses. A program that knows the interpreter's inside can get round it.
Exit code 1 means that the program failed; the last line of stderr says how.
"""

from __future__ import annotations

import errno
import os
import resource
import sys

TYPE_CHECKING = False  # as typing's, whose import takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NO_FILTER = "the kernel takes no system call filter (x86-64 and arm64 have one)"
_NAME = "<program>"
_LINE = 400
_OPEN_FILES = 64

# System calls refused, by number: (x86-64, arm64); None where there is none.
_REFUSED_CALLS: dict[str, tuple[int, int | None]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "prctl": (157, 167),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SIGKILL = 9
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000

# Modules that reach files, memory or processes past the audit hook.
_REFUSED_MODULES = {"ctypes", "_ctypes", "_sqlite3", "_dbm", "_gdbm", "_posixshmem", "_multiprocessing"}
_REFUSED_EVENTS = {
    "os.chmod", "os.chown", "os.lchown", "os.getxattr", "os.listxattr", "os.removexattr", "os.setxattr",
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "os.kill", "os.killpg", "signal.pthread_kill", "resource.prlimit", "resource.setrlimit",
    "pty.spawn", "subprocess.Popen",
}  # fmt: skip
_REFUSED_FAMILIES = ("ctypes.", "socket.", "syslog.")
_READ_EVENTS = {"os.listdir", "os.scandir"}
_WRITE_EVENTS = {
    "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime"
}  # fmt: skip
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main(limits: dict[str, int], owner: int) -> None:
    """Close the doors, take the program's source, run it, and leave."""
    limit_resources(limits)
    limit_calls(owner, isolated=bool(limits["isolated"]))
    source = read_source()
    sys.addaudithook(audit_hook(os.path.realpath("."), limits["changes"]))
    os._exit(run(source))


def read_source() -> str:
    """The program from standard input, which is empty from then on. The first byte is not the program's."""
    pieces = []
    while piece := os.read(0, 1 << 16):
        pieces.append(piece)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return b"".join(pieces)[1:].decode("utf-8")


def limit_resources(limits: dict[str, int]) -> None:
    """The kernel's limits; a user's own ones stay if they are lower."""
    mib = 1 << 20
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_s"] + 1,
        resource.RLIMIT_AS: limits["memory_mb"] * mib,
        resource.RLIMIT_FSIZE: limits["file_mb"] * mib,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A second between the two for CPU time: at the first the kernel says why it ends the program.
        soft = limits["cpu_s"] if kind == resource.RLIMIT_CPU else value
        resource.setrlimit(kind, (min(soft, value), value))


def limit_calls(owner: int, *, isolated: bool = False) -> None:
    """On Linux: die with the parent, and have the kernel refuse what a program has no need of.

    Isolated, the parent is bubblewrap, and a kernel that takes no filter is the end.
    """
    if sys.platform != "linux":
        return
    import ctypes
    import struct

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if is_orphan(owner, isolated=isolated):
        os._exit(1)
    program, filtered = call_filter(os.uname().machine), False
    if program:
        held = ctypes.create_string_buffer(program, len(program))
        header = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(held))
        )
        prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        filtered = prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header), 0, 0) == 0
    if isolated and not filtered:
        os.write(2, f"{NO_FILTER}\n".encode())
        os._exit(1)
    for module in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[module]


def is_orphan(owner: int, *, isolated: bool) -> bool:
    """Whether the owner died before this process was tied to it; its process is out of sight if isolated."""
    if not isolated:
        return os.getppid() != owner
    import select

    output = select.poll()
    output.register(1, 0)  # tells no event but that nobody reads
    return bool(output.poll(0))


def call_filter(machine: str) -> bytes:
    """The filter as the kernel's program: it refuses the calls above and allows others. Empty: no filter."""
    if machine not in _ARCHITECTURES:
        return b""
    column, architecture = _ARCHITECTURES[machine]
    numbers = [both[column] for both in _REFUSED_CALLS.values() if both[column] is not None]
    # Each step: code, jump if true, jump if false, number. A 32-bit call has other numbers: the end.
    steps = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    steps += [(_IF_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE)]
    for number in numbers:
        steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(
        code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + number.to_bytes(4, sys.byteorder)
        for code, yes, no, number in steps
    )


def audit_hook(folder: str, changes: int) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that raises for what a program may not do in Python's words."""
    library = [os.path.realpath(path) for path in sys.path]
    readable = (folder, *library, "/dev/null", "/dev/urandom", "/usr/share/zoneinfo")
    writable = (folder, "/dev/null")
    left = changes

    def inside(path: Any, roots: tuple[str, ...]) -> bool:
        if isinstance(path, int):  # an open file
            return True
        real = os.path.realpath(os.fsdecode("." if path is None else path))
        return any(real == root or real.startswith(root + os.sep) for root in roots)

    def change(paths: tuple[Any, ...]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise PermissionError(f"the sandbox allows {changes} changes of files")
        for path in paths:
            if not inside(path, writable):
                raise PermissionError(f"the sandbox does not allow writing {path!r}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITE_FLAGS:
                change((path,))
            elif not inside(path, readable):
                raise PermissionError(f"the sandbox does not allow reading {path!r}")
        elif event == "import":
            if args[0] in _REFUSED_MODULES:
                raise ImportError(f"the sandbox does not have {args[0]}")
        elif event in _WRITE_EVENTS:
            change(tuple(arg for arg in args if isinstance(arg, str | bytes | os.PathLike)))
        elif event in _READ_EVENTS:
            if not inside(args[0], readable):
                raise PermissionError(f"the sandbox does not allow reading {args[0]!r}")
        elif event in _REFUSED_EVENTS or event.startswith(_REFUSED_FAMILIES):
            if event == "socket.__new__" and args[1] == 1:  # AF_UNIX: pairs within the process, as asyncio's
                return
            raise PermissionError(f"the sandbox does not allow {event}")

    return hook


def run(source: str) -> int:
    """Run the program as `__main__`; its exit code, with the error's line on stderr."""
    module = type(sys)("__main__")
    mine = sys.modules["__main__"]
    sys.modules["__main__"] = module
    sys.argv = [_NAME]
    try:
        exec(compile(source, _NAME, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        code, line = exit_code(error)
    except BaseException as error:
        code, line = 1, error_line(error)
        error.__traceback__ = None
    else:
        code, line = 0, ""
    sys.modules["__main__"] = mine
    module.__dict__.clear()  # after a MemoryError: room for what follows
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the program closed it
        code, line = code or 1, line or "the program closed its output"
    if line:
        os.write(2, f"\n{line}\n".encode("utf-8", "replace"))
    return code


def exit_code(error: SystemExit) -> tuple[int, str]:
    """The code that the program asked for; text counts as 1, as in Python.

    Codes above 128 are told in words: from bubblewrap they mean a signal.
    """
    if error.code is None or isinstance(error.code, int):
        code = (error.code or 0) & 255
        return (code, "") if code <= 128 else (1, f"the program ended with exit code {code}.")
    return 1, f"SystemExit: {error.code}"[:_LINE]


def error_line(error: BaseException) -> str:
    """The last line of the traceback, and the program's line it came from."""
    if isinstance(error, MemoryError):
        return "MemoryError"
    name = type(error).__name__
    if isinstance(error, SyntaxError):
        text, number = str(error.msg), error.lineno if error.filename == _NAME else None
    else:
        number, place = None, error.__traceback__
        while place is not None:
            if place.tb_frame.f_code.co_filename == _NAME:
                number = place.tb_lineno
            place = place.tb_next
        try:
            text = str(error)
        except BaseException:  # its own __str__ raises: the name must do
            text = ""
    line = " ".join(f"{name}: {text}".split())[:_LINE] if text else name
    return line if number is None else f"{line} (line {number})"


if __name__ == "__main__":
    _, *limits, owner = sys.argv
    main({name: int(value) for name, _, value in (each.partition("=") for each in limits)}, int(owner))
