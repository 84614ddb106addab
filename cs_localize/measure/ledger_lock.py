"""One writer a ledger folder, on one machine or on several that share the folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from cs_localize.errors import LedgerError

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True)
class Writer:
    """Who holds a folder.

    Attributes:
        host: its machine's name.
        pid: its process there.
        since: when it took the folder, UTC.
    """

    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class FolderLock:
    """Held by one process at a time; whoever holds it may acquire it again.

    Two files make it. ``.writer`` names the holder and comes into being by a hard link, which is atomic on every
    shared file system that has hard links; it stops other machines. ``.lock`` is flocked, which the kernel ends with
    the process; it stops other processes of the machine, and shows that a ``.writer`` of this machine is a dead one's.
    Nothing relies on flock reaching other machines. Where a file system has no flock at all, a ``.writer`` that a
    killed process left has to be deleted by hand.

    Args:
        folder: what is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.marker = folder / ".writer"
        self._folder = folder
        self._depth = 0
        self._guard: int | None = None
        self._own = b""

    @property
    def held(self) -> bool:
        """Whether this object holds the folder."""
        return self._depth > 0

    def acquire(self) -> bool:
        """Takes the folder; True if it was not held before.

        Raises:
            LedgerError: if another process holds the folder, or it cannot be written.
        """
        if not self._depth:
            try:
                self._take()
            except BaseException as error:
                self._drop_guard()
                if not isinstance(error, OSError):
                    raise
                raise LedgerError(
                    f"the ledger folder {self._folder} cannot be locked for writing: {error.strerror or error}"
                ) from None
        self._depth += 1
        return self._depth == 1

    def release(self) -> None:
        """Gives the folder back once every ``acquire`` has its ``release``."""
        self._depth -= 1
        if not self._depth:
            try:
                with suppress(OSError):  # on a dead file system there is nothing left to give back
                    if self._read() == self._own:
                        self.marker.unlink()
            finally:
                self._drop_guard()

    def check(self) -> None:
        """Raises LedgerError if ``.writer`` was deleted or replaced while this process works."""
        try:
            own = self._read() == self._own
        except OSError as error:
            raise LedgerError(f"the ledger folder {self._folder} cannot be read: {error.strerror}") from None
        if not own:
            raise LedgerError(
                f"{self.marker} was taken away while this study writes to {self._folder}; run it again once no other "
                "study writes there"
            )

    def _take(self) -> None:
        guarded = self._take_guard()
        host = socket.gethostname()
        stamp = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self._own = json.dumps(asdict(Writer(host, os.getpid(), stamp))).encode()
        temporary = self._folder / f".writer-{host}-{os.getpid()}.tmp"
        try:
            if guarded:  # so whoever made such a file is dead
                for leftover in self._folder.glob(f".writer-{host}-*.tmp"):
                    leftover.unlink()
            temporary.write_bytes(self._own)
            with suppress(FileExistsError):
                os.link(temporary, self.marker)
            if temporary.stat().st_nlink == 2:  # over NFS a link can be made and its answer lost
                return
            there = self._holder()
            if not guarded or there is None or there.host != host:
                raise self._refusal(there)
            temporary.replace(self.marker)  # a process of this machine that lives would hold the flock
        finally:
            temporary.unlink(missing_ok=True)

    def _take_guard(self) -> bool:
        """Flocks ``.lock``; False where the file system has no flock."""
        self._guard = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise self._refusal(self._holder(), by_hand=False) from None
            if error.errno in _NO_FLOCK:
                return False
            raise
        return True

    def _drop_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            os.close(guard)

    def _read(self) -> bytes | None:
        try:
            return self.marker.read_bytes()
        except FileNotFoundError:
            return None

    def _holder(self) -> Writer | None:
        """Whom ``.writer`` names; None if it names nobody."""
        try:
            return Writer(**json.loads(self._read() or b""))
        except (ValueError, TypeError):
            return None

    def _refusal(self, writer: Writer | None, by_hand: bool = True) -> LedgerError:
        who = f": {writer}" if writer else ""
        gone = f"; if it runs no more, delete {self.marker}" if by_hand else ""
        return LedgerError(
            f"another study is writing to {self._folder}{who}; wait for it to end, or give this one another "
            f"ledger{gone}"
        )
