"""What code in the sandbox can and cannot do. It reaches for ``posix`` and ``ctypes``, past what ``os`` has lost."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cs_localize import sandbox
from cs_localize.errors import CsLocalizeError
from cs_localize.sandbox import Limits, inside, passes, run, unavailable

ROOT = Path(sandbox.__file__).parents[2]
TIGHT = Limits(cpu_s=1, wall_s=1.5)
TESTS = "\nassert double(2) == 4\nassert double(0) == 0\n"
RIGHT = "def double(n):\n    return 2 * n\n"
WRONG = "def double(n):\n    return n\n"
EVERYWHERE = """import posix
def tell(text):
    for fd in range(64):
        try:
            posix.write(fd, text)
        except OSError:
            pass
"""


def alive() -> list[int]:
    """Processes of these tests' sandbox that are not yet gone; all of them bear the command of the first."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(run._INSIDE) in (process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    inside = Path(shutil.copy(run._INSIDE, tmp_path / "inside.py"))
    monkeypatch.setattr(run, "_INSIDE", inside)
    yield
    monkeypatch.setattr(run, "_INSIDE", inside)
    deadline = time.monotonic() + 5
    while alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive()


def test_there_is_a_sandbox_here() -> None:
    assert unavailable() == ""


def test_a_program_passes_if_it_runs_to_its_end() -> None:
    assert passes(RIGHT + TESTS)
    assert not passes(WRONG + TESTS)
    assert not passes("def double(n:" + TESTS)
    assert not passes("x = '\ud800'" + TESTS), "text that is none in UTF-8"
    assert not passes("\0")


HOSTILE = {
    "a fork bomb": "import posix\nwhile True:\n    try:\n        posix.fork()\n    except OSError:\n        pass",
    "an endless loop": "while True:\n    pass",
    "a loop that takes no for an answer": "while True:\n    try:\n        while True:\n            pass\n"
    "    except BaseException:\n        pass",
    "an endless sleep": "import time\ntime.sleep(1e6)",
    "100 GiB": "x = bytearray(100 << 30)",
    "endless growth": "x = []\nwhile True:\n    x.append(bytes(1 << 20))",
    "endless output": "while True:\n    print('x' * 100000)",
    "endless output past sys.stdout": EVERYWHERE + "while True:\n    tell(b'x' * 65536)",
    "a deep recursion": "def f():\n    f()\nf()",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "its own end": "import posix, signal\nposix.kill(posix.getpid(), signal.SIGKILL)",
    "the end of its parent": "import posix\nposix.kill(posix.getppid(), 9)\nposix.kill(1, 9)\nassert False",
    "the end of all": "import posix\nposix.kill(-1, 9)\nposix.kill(0, 9)",
    "a daemon": "import posix, time\nif posix.fork() == 0:\n    posix.setsid()\n    if posix.fork() == 0:\n"
    "        while True:\n            time.sleep(1)\n    posix._exit(0)\nassert False",
    "exit before the tests": "import sys\nsys.exit(0)",
    "a hard exit before the tests": "import posix\nposix._exit(0)",
    "a marker printed": "print('passed')\nprint('ready')",
    "a marker everywhere": EVERYWHERE + "tell(b'ready')\ntell(b'passed')\nposix._exit(0)",
    "another AssertionError": "import builtins\nclass Quiet(BaseException):\n    pass\n"
    "builtins.AssertionError = AssertionError = Quiet",
    "another exec, write and exit": "import builtins, os, sys\nbuiltins.exec = lambda *a: None\n"
    "os._exit = sys.exit = sys.excepthook = lambda *a: None\nos.write = lambda fd, data: 0",
    "a checker of its own": "def double(n):\n    return n\ndef check(candidate):\n    return True",
}


@pytest.mark.parametrize("trick", HOSTILE)
def test_a_hostile_answer_is_contained_and_wrong(trick: str) -> None:
    began = time.monotonic()
    assert not passes(HOSTILE[trick] + "\n" + WRONG + TESTS, TIGHT)
    assert time.monotonic() - began < 10
    assert passes(RIGHT + TESTS), "and the next one is graded"


def test_what_makes_every_test_pass_passes_none() -> None:
    """The nonce taken from the memory of the process: told apart by a test that cannot hold."""
    thief = "import sys\nframe = sys._getframe(1)\ntell(frame.f_locals['nonce'])\nposix._exit(0)\n"
    program = EVERYWHERE + thief + WRONG + TESTS
    assert run._completes(program, Limits()), "the trick works, or this test shows nothing"
    assert not passes(program)


CONTAINED = {
    "memory": "try:\n    x = bytearray(2 << 30)\nexcept MemoryError:\n    pass\nelse:\n    raise AssertionError",
    "disk": """
written = 0
try:
    for number in range(10):
        with open(str(number), 'wb', buffering=0) as file:
            for _ in range(16):
                written += file.write(bytes(1 << 20))
except OSError:
    pass
assert 10 << 20 < written <= 16 << 20, written
""",
    "processes": """
import posix, time
children = 0
while children < 100:
    try:
        child = posix.fork()
    except OSError:
        break
    if child == 0:
        time.sleep(60)
        posix._exit(0)
    children += 1
assert 0 < children < 8, children
""",
    "open files": "files = []\ntry:\n    while len(files) < 1000:\n        files.append(open('x', 'w'))\n"
    "except OSError:\n    pass\nassert 10 < len(files) < 64",
    "the folder": "import os, posix\nassert posix.getcwd() == os.environ['HOME'] == '/sandbox'\n"
    "assert posix.listdir('.') == []\nopen('note', 'w').write('x')\nassert posix.listdir('.') == ['note']",
    "the environment": "import os\n"
    "assert {*os.environ} == {'HOME', 'TMPDIR', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'}",
    "the rest of the disk": """
import posix, sys
for folder in ('/', '/usr', '/usr/lib', '/dev', *sys.path[1:]):
    try:
        open(folder + '/mine', 'w')
    except OSError:
        pass
    else:
        raise AssertionError(folder)
assert not {'proc', 'sys', 'home', 'var', 'old', 'run'} & set(posix.listdir('/'))
""",
    "rights": """
import ctypes, posix
libc = ctypes.CDLL(None, use_errno=True)
assert posix.getuid() == 1000 and posix.getgid() == 1000
for uid in (0, 65534):
    try:
        posix.setuid(uid)
    except OSError:
        pass
    else:
        raise AssertionError(uid)
assert libc.mount(b'tmpfs', b'/sandbox', b'tmpfs', 0, None) == -1
assert libc.umount2(b'/sandbox', 2) == -1
assert libc.chroot(b'/sandbox') == -1
for namespace in (0x20000, 0x10000000, 0x20000000, 0x40000000):
    assert libc.unshare(namespace) == -1
assert libc.prctl(39, 0, 0, 0, 0) == 1, 'no new privileges'
""",
    "other processes": """
import ctypes, posix
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(16, 1, None, None) == -1 and libc.ptrace(0x4206, 1, None, None) == -1
assert posix.getppid() == 1
for process in range(3, 400):
    try:
        posix.kill(process, 0)
    except OSError:
        pass
    else:
        raise AssertionError(process)
""",
    "limits that stay": "import sys\ndel sys.modules['resource']\nimport resource\n"
    "for kind in range(10):\n    soft, hard = resource.getrlimit(kind)\n    if hard not in (-1, 0):\n        try:\n"
    "            resource.setrlimit(kind, (hard + 1, hard + 1))\n        except ValueError:\n            pass\n"
    "        else:\n            raise AssertionError(kind)",
}


@pytest.mark.parametrize("what", CONTAINED)
def test_a_program_that_looks_for_a_way_out_finds_that_there_is_none(what: str) -> None:
    assert passes(CONTAINED[what], Limits(cpu_s=2, wall_s=5))


def test_files_of_the_user_are_not_there(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.parquet"
    ledger.write_text("outcomes")
    home = Path.home()
    paths = [ledger, home / ".bashrc", home / ".ssh", Path(__file__), Path("/etc/passwd"), Path("/proc/1/environ")]
    for path in (*paths, Path(f"/proc/{os.getpid()}/environ")):
        reading = (
            f"try:\n    open({str(path)!r})\nexcept FileNotFoundError:\n    pass\nelse:\n    raise AssertionError\n"
        )
        assert passes(reading), path
    assert not passes(f"open({str(ledger)!r}, 'w')")
    assert ledger.read_text() == "outcomes"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        for address in (server.getsockname(), other.getsockname(), ("192.0.2.1", 80), ("1.1.1.1", 53)):
            asking = "import socket\ntry:\n    socket.create_connection({}, timeout=1)\nexcept OSError as error:\n"
            asking += "    assert error.errno == 101, error\nelse:\n    raise AssertionError\n"
            assert passes(asking.format(address)), "network is unreachable"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_keys_of_the_session_are_not_there() -> None:
    keyctl = inside._SYSCALL_KEYCTL[os.uname().machine]
    session = ctypes.CDLL(None).syscall(*map(ctypes.c_long, (keyctl, 0, -3, 1)))  # the id of the session's keyring
    asking = f"import ctypes\nid = ctypes.CDLL(None).syscall(*map(ctypes.c_long, ({keyctl}, 0, -3, 1)))\n"
    assert session > 0
    assert passes(f"{asking}assert 0 < id != {session}")


def test_the_same_text_has_the_same_verdict() -> None:
    order = "assert list({'ab', 'cd', 'ef', 'gh'}) == list({'ab', 'cd', 'ef', 'gh'})\nassert hash('ab') % 2 == 0"
    assert len({passes(order) for _ in range(4)}) == 1


def test_numpy_is_there() -> None:
    assert passes("import numpy\nassert numpy.linalg.inv(numpy.eye(3)).sum() == 3")


def test_many_run_side_by_side() -> None:
    programs = [RIGHT + TESTS, WRONG + TESTS] * 6
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(passes, programs)) == [True, False] * 6


def test_a_program_ends_with_the_driver_that_runs_it() -> None:
    code = "from pathlib import Path\nfrom cs_localize.sandbox import Limits, passes, run\n"
    code += f"run._INSIDE = Path({str(run._INSIDE)!r})\npasses('import time\\ntime.sleep(1e6)', Limits(wall_s=600))\n"
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while len(alive()) < 3:
        time.sleep(0.02)
    driver.kill()
    driver.wait()


def in_user_namespace(code: str, *options: str) -> str:
    command = ["unshare", "--user", *options, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_an_ordinary_user_has_the_sandbox_too() -> None:
    code = "import os\nfrom cs_localize.sandbox import passes\n"
    code += "print(os.geteuid(), passes('import posix\\nassert posix.getuid() == 1000'), passes('assert 0'))\n"
    assert in_user_namespace(code, "--map-user=1234", "--map-group=1234") == "1234 True False\n"


def test_where_namespaces_are_forbidden_it_is_refused() -> None:
    """In a user namespace that may have none within, as on systems that forbid them."""
    code = "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
    code += "from cs_localize.sandbox import unavailable\nprint(unavailable())\n"
    message = in_user_namespace(code, "--map-root-user")
    assert "cannot be shut in on this machine: OSError" in message
    assert "unshare: No space left on device" in message
    assert message.count("\n") == 1


def test_a_sandbox_that_does_not_start_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_INSIDE", Path("/nowhere/inside.py"))
    with pytest.raises(CsLocalizeError, match="cannot be shut in on this machine"):
        passes(RIGHT + TESTS)
