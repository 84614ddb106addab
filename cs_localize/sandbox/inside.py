"""The process that shuts itself in and executes one program there. Run by its path, with the standard library alone.

It gets a JSON object on standard input: ``program``; ``nonce``, what to write to standard output once the program has
run to its end; ``parent``, the process whose end is to be this one's; ``packages``, folders to import from besides the
standard library; and the limits. Standard error gets ``ready`` before the program starts, or what could not be had.

Three processes: the first makes the namespaces and belongs to the old ones, the second is process 1 of the new ones and
builds their file system, the third gives up all rights and executes the program. With the second all that the third has
started ends as well.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

_INSIDE_ID, _NOBODY = 1000, 65534
_MOUNT_POINT = "/tmp"  # a folder that every old file system has
_PROGRAM_FOLDER = "/sandbox"  # in the new one
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", f"{sys.base_prefix}/lib")
_LINKER_CACHE = "/etc/ld.so.cache"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38  # prctl
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mounts, host name, System V memory, users, processes, network."""
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _BIND, _RECURSIVELY, _PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000  # mount
_DETACH = 2  # umount2
_SYSCALL_MOUNT_SETATTR, _AT_CURRENT_FOLDER, _AT_RECURSIVE = 442, -100, 0x8000
_CAPABILITY_VERSION = 0x20080522
_SYSCALL_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1

_DISABLED = {
    builtins: "exit quit help",
    os: "chdir chmod chown chroot fchdir fchmod fchown fork forkpty getcwd kill killpg lchflags lchmod lchown "
    "remove removedirs rename renames replace rmdir setuid system truncate unlink",
    shutil: "chown move rmtree",
    subprocess: "Popen",
}
_HIDDEN_MODULES = ("ipdb", "joblib", "psutil", "resource", "tkinter")
"""What programs graded by the metric code_eval do without, there for safety, here to fail alike. It takes away
``os.putenv`` as well, without which NumPy does not import."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Makes the namespaces and waits for process 1 in them."""
    task = json.loads(sys.stdin.buffer.read())
    try:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != task["parent"]:  # it ended before it could be told
            os._exit(1)
        _leave_keyring()
        _enter_namespaces()
        _prctl(_SET_DUMPABLE, 0)
        child = os.fork()
        if child == 0:
            _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            _be_process_one(task)
    except Exception as error:
        _fail(error)
    _wait_for(child)


def _leave_keyring() -> None:
    """The keys of the user's session come along into every namespace, so an empty keyring takes the place of theirs."""
    machine = os.uname().machine
    if machine not in _SYSCALL_KEYCTL:
        raise OSError(errno.ENOSYS, f"the kernel's keys cannot be kept away on {machine}")
    numbers = (_SYSCALL_KEYCTL[machine], _JOIN_SESSION_KEYRING)
    try:
        _call("syscall", *map(ctypes.c_long, numbers), None, what="keyctl")
    except OSError as error:
        if error.errno != errno.ENOSYS:  # a kernel without keys
            raise


def _enter_namespaces() -> None:
    """User ids can be mapped from outside alone, so a child stays there to do it."""
    target, ids = os.getpid(), (os.geteuid(), os.getegid())
    waiting, entered = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(entered)
        try:
            if os.read(waiting, 1):
                _map_ids(target, *ids)
        except OSError as error:
            _fail(error)
        os._exit(0)
    os.close(waiting)
    _call("unshare", _NEW_NAMESPACES)
    os.write(entered, b"1")
    _, status = os.waitpid(child, 0)
    if status:
        os._exit(1)
    os.close(entered)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # in one of its own the program would have rights again


def _map_ids(process: int, uid: int, gid: int) -> None:
    """The program runs as this user, or as nobody where this user is root."""
    if uid == 0:
        lines = dict.fromkeys(("uid_map", "gid_map"), f"0 0 1\n{_INSIDE_ID} {_NOBODY} 1")
    else:
        lines = {"setgroups": "deny", "uid_map": f"{_INSIDE_ID} {uid} 1", "gid_map": f"{_INSIDE_ID} {gid} 1"}
    for name, line in lines.items():
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(line)


def _be_process_one(task: dict[str, Any]) -> NoReturn:
    """Builds the file system; when this ends, so does every process in here."""
    try:
        sys.path += task["packages"]
        _build_file_system(task["disk_mib"])
        child = os.fork()
        if child == 0:
            os.setsid()
            _give_up_rights()
            _execute(task)
    except Exception as error:
        _fail(error)
    _wait_for(child)


def _build_file_system(disk_mib: int) -> None:
    """Libraries to read, an empty folder to write to, and nothing else."""
    _mount(None, "/", None, _RECURSIVELY | _PRIVATE)
    _mount("tmpfs", _MOUNT_POINT, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    os.chdir(_MOUNT_POINT)
    os.mkdir("old")
    _call("pivot_root", b".", b"old")
    os.chdir("/")
    for path in _outermost([*_LIBRARIES, *filter(os.path.isabs, sys.path), _LINKER_CACHE]):
        _show(path)
    for path in _DEVICES:
        _show(path, devices=True)
    os.mkdir(_PROGRAM_FOLDER)
    if not os.path.exists("/tmp"):
        os.symlink(_PROGRAM_FOLDER, "/tmp")
    _mount("tmpfs", _PROGRAM_FOLDER, "tmpfs", _NO_SETUID | _NO_DEVICES, f"size={disk_mib}m,nr_inodes=4096,mode=777")
    _call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    _set_attributes("/", _READ_ONLY)
    os.chdir(_PROGRAM_FOLDER)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Paths that are in no other; an outer one comes before what its links point to."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}):
        if not any(path.startswith(f"{outer}/") for outer in kept):
            kept.append(path)
    return kept


def _show(path: str, devices: bool = False) -> None:
    """Makes something of the old file system visible at its place, unwritable."""
    source = _in_old(path)
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT))
    else:
        return
    _mount(source, path, None, _BIND | _RECURSIVELY)
    if not devices:
        _set_attributes(path, _READ_ONLY | _NO_SETUID | _NO_DEVICES, _AT_RECURSIVE)


def _in_old(path: str) -> str:
    """Where a path of the old file system is now; its links, absolute ones too, are followed there."""
    found, rest, links = "/old", path.strip("/").split("/"), 0
    while rest:
        step = rest.pop(0)
        if step == "..":
            found = os.path.dirname(found) if found != "/old" else found
            continue
        if os.path.islink(f"{found}/{step}") and links < 40:
            links += 1
            target = os.readlink(f"{found}/{step}")
            found = "/old" if target.startswith("/") else found
            rest = [part for part in target.split("/") if part not in ("", ".")] + rest
        else:
            found = f"{found}/{step}"
    return found


def _give_up_rights() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    _prctl(_SET_DUMPABLE, 0)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)


def _execute(task: dict[str, Any]) -> NoReturn:
    """Runs the program with the limits of the task; afterwards, if that point is reached, writes the nonce."""
    program, nonce = task["program"], task["nonce"].encode()
    null = os.open("/dev/null", os.O_RDWR)
    verdict = os.dup(1)
    write, end = os.write, os._exit  # the program may put others in their place
    _limit(task)
    write(2, b"ready")
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdin = sys.stdout = sys.stderr = _Silence()
    os.environ.clear()
    os.environ |= {"HOME": _PROGRAM_FOLDER, "TMPDIR": _PROGRAM_FOLDER, "OMP_NUM_THREADS": "1"}
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each would take address space for a thread of every core
    _disable()
    try:
        exec(program, {})
    except BaseException:
        end(1)
    write(verdict, nonce)
    end(0)


def _limit(task: dict[str, Any]) -> None:
    mib = 1 << 20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, task["cpu_s"], task["cpu_s"] + 1),
        (resource.RLIMIT_AS, task["memory_mib"] * mib, task["memory_mib"] * mib),
        (resource.RLIMIT_FSIZE, task["disk_mib"] * mib, task["disk_mib"] * mib),
        (resource.RLIMIT_NOFILE, task["files"], task["files"]),
        (resource.RLIMIT_NPROC, task["processes"], task["processes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))


def _disable() -> None:
    for module, names in _DISABLED.items():
        for name in names.split():
            setattr(module, name, None)
    for name in _HIDDEN_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # what makes an import fail


class _Silence(io.TextIOBase):
    """Takes whatever is printed, keeps nothing, and cannot be read."""

    def write(self, text: str) -> int:
        return len(text)


def _wait_for(child: int) -> NoReturn:
    """Ends when the child does; its pipes are the child's alone."""
    os.closerange(0, 3)
    while True:
        ended, _ = os.wait()
        if ended == child:
            os._exit(0)


def _fail(error: Exception) -> NoReturn:
    os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(1)


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3], what=f"mount {target}")


def _set_attributes(path: str, attributes: int, flags: int = 0) -> None:
    """Of a mount, ``mount_setattr(2)``, for which the C library of many systems has no function."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    numbers = (ctypes.c_long(_SYSCALL_MOUNT_SETATTR), ctypes.c_long(_AT_CURRENT_FOLDER))
    _call("syscall", *numbers, path.encode(), ctypes.c_long(flags), wanted, ctypes.c_size_t(32), what="mount_setattr")


def _call(function: str, *arguments: object, what: str = "") -> None:
    """A function of the C library that returns -1 where it fails."""
    symbol: Callable[..., int] = getattr(_libc, function)
    if symbol(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what or function}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
