"""A child process that runs one untrusted program, and imports no module of atts."""

# The module `programs.py` starts this file as a script, in a new session and with a clean
# environment. The files for input and output are opened before `_confine` is called. After this
# call, the untrusted program can open only files of Python's library. It cannot start or signal a
# process, or open a socket. The expected outputs never reach this process, because the parent
# process compares the outputs.

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

_MEBIBYTE = 1 << 20
# A seccomp filter returns one of these two values: allow the system call, or let it fail.
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_X86_64 = 0xC000003E  # the number of the x86-64 architecture in seccomp filters
_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
# System calls from this number on use the x32 interface of the kernel. All of them are refused.
_X32 = 0x40000000
# Numbers of the x86-64 system calls that are refused. They belong to sockets, processes, signals,
# limits and system administration. Calls that change permissions or times of files are refused too,
# because Landlock does not restrict them.
_REFUSED = (
    *(41, 42, 43, 44, 46, 49, 50, 53, 288, 425),  # calls for sockets and for io_uring
    # fork, vfork, execve, execveat, ptrace, memory of other processes
    *(57, 58, 59, 322, 101, 310, 311, 312),
    # signals, and file descriptors of other processes
    *(62, 129, 200, 234, 297, 424, 434, 438),
    # system calls that change sessions, resource limits and priorities
    *(109, 112, 160, 302, 141, 142, 144, 203, 314),
    # shared memory and message queues, which would still exist after the end of the process
    *(29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 240, 241),
    # permissions, owners and times of files
    *(90, 91, 92, 93, 94, 260, 268, 452, 132, 235, 261, 280),
    *(188, 189, 190, 197, 198, 199),  # calls for extended attributes of files
    # calls that change the user, the group or capabilities
    *(105, 106, 113, 114, 116, 117, 119, 122, 123, 126),
    # calls for mounts, the host name and devices
    *(155, 161, 165, 166, 167, 168, 169, 170, 171, 172, 173, 163, 179),
    # setting clocks, loading kernel modules, loading another kernel
    *(159, 164, 227, 305, 175, 176, 246, 313, 320),
    # kernel keys, namespaces, performance events, file handles
    *(248, 249, 250, 272, 298, 304, 308, 321, 323),
)


def main() -> None:
    """Run program.py in the working directory under the limits in job.json.

    If job.json names a function, call it with each list of arguments there, and write the results
    as lines of JSON.
    """
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    if job["function"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # The result is what the function returns. What it prints is discarded.
        os.dup2(nowhere, 1)
    try:
        _confine(job)
    except OSError as error:
        sys.stderr.write(f"the program cannot be confined: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # never run the untrusted program without the restrictions
    sys.setrecursionlimit(20_000)
    space: dict[str, Any] = {"__name__": "__main__" if not job["function"] else "program"}
    exec(compile(source, "program.py", "exec"), space)
    if job["function"]:
        for arguments in job["arguments"]:
            results.write(json.dumps(_called(space, job["function"], arguments)) + "\n")
            results.flush()


def _called(space: dict[str, Any], name: str, arguments: list[Any]) -> dict[str, Any]:
    """Call the task's function and return its result. The function may be a method of a class
    Solution.
    """
    if "Solution" in space:
        function = getattr(space["Solution"](), name)
    else:
        function = space[name]
    return {"value": function(*arguments)}


def _confine(job: dict[str, Any]) -> None:
    """Prepare the process for an untrusted program: limit its resources, files and system calls.

    Raises OSError if the system does not support this.
    """
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        raise OSError(
            errno.ENOSYS, f"programs can run only on Linux on x86-64, not on {platform.machine()}"
        )
    _limit(resource.RLIMIT_CPU, job["seconds"])
    _limit(resource.RLIMIT_AS, job["megabytes"] * _MEBIBYTE)
    _limit(resource.RLIMIT_FSIZE, job["output_megabytes"] * _MEBIBYTE)
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, 64 * _MEBIBYTE)
    libc = ctypes.CDLL(None, use_errno=True)
    # Set PR_SET_NO_NEW_PRIVS; without it, the kernel refuses Landlock and seccomp.
    _check(libc.prctl(38, 1, 0, 0, 0))
    _restrict_files(libc)
    _restrict_calls(libc)


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, value))


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _restrict_files(libc: ctypes.CDLL) -> None:
    """Use Landlock to let the process open only the libraries of Python and the system, and only
    for reading.
    """
    version = _check(libc.syscall(444, None, 0, 1))
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    handled = ctypes.create_string_buffer(struct.pack("<Q", rights), 8)
    rules = _check(libc.syscall(444, handled, 8, 0))
    read = 1 << 2 | 1 << 3
    for folder in {os.path.dirname(os.__file__), "/usr/lib", "/lib", "/lib64"}:
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("<Qi", read, handle), 12)
            _check(libc.syscall(445, rules, 1, rule, 0))
            os.close(handle)
    _check(libc.syscall(446, rules, 0))
    os.close(rules)


def _restrict_calls(libc: ctypes.CDLL) -> None:
    """Use seccomp to refuse system calls that affect anything outside the process."""

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    load, equal, at_least, any_bit, back = 0x20, 0x15, 0x35, 0x45, 0x06
    refused = line(back, _ERRNO | errno.EPERM)
    filters = [
        line(load, 4),
        line(equal, _X86_64, 1, 0),
        refused,
        line(load, 0),
        line(at_least, _X32, 0, 1),
        refused,
        line(equal, _CLONE3, 0, 1),
        # pretend that clone3 does not exist, so that the C library calls clone
        line(back, _ERRNO | errno.ENOSYS),
    ]
    for number in _REFUSED:
        filters += [line(equal, number, 0, 1), refused]
    filters += [
        line(equal, _CLONE, 0, 3),
        # Threads are allowed, but new processes are not. So look at the flags of clone, the first
        # argument.
        line(load, 16),
        line(any_bit, _CLONE_THREAD, 1, 0),
        refused,
        line(back, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(filters))
    program = struct.pack("<HxxxxxxQ", len(filters), ctypes.addressof(code))
    _check(libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0))


if __name__ == "__main__":
    main()
