"""The job server of a Ray cluster: what runs there, its logs, its end. Everything it says goes through here."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from cs_localize.errors import CsLocalizeError, UsageError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_TALKATIVE = (
    "ray._private.runtime_env.packaging",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
)
"""Modules of Ray that tell of every package and every connection."""

_KNOCK_S = 10.0
_POLL_S = 0.5
_STOP_PATIENCE_S = 60.0


class JobServer:
    """The jobs of one cluster.

    Args:
        client: Ray's client.
        address: where it is connected, for messages.
        sleep: waits so many seconds.
    """

    def __init__(self, client: JobSubmissionClient, address: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.address = address
        self._client = client
        self._sleep = sleep

    def start(
        self, submission_id: str, entry_point: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> bool:
        """Starts a job.

        Returns:
            False if another submission was quicker, and a job of that id is there already.

        Raises:
            CsLocalizeError: if the server does not take it.
        """
        try:
            with self._translated():
                self._client.submit_job(
                    submission_id=submission_id, entrypoint=entry_point, runtime_env=runtime_env, metadata=metadata
                )
        except CsLocalizeError:
            if self.find(submission_id) is None:
                raise
            return False
        return True

    def find(self, submission_id: str) -> JobDetails | None:
        """The job of that id, None where there is none."""
        with self._translated():
            try:
                details = self._client.get_job_info(submission_id)
            except RuntimeError as error:
                if "status code 404" in str(error):
                    return None
                raise
        return details

    def job(self, submission_id: str) -> JobDetails:
        """The job of that id.

        Raises:
            UsageError: if there is none.
        """
        details = self.find(submission_id)
        if details is None:
            raise UsageError(
                f"no job '{submission_id}' at {self.address}; `cs-localize ls --address {self.address}` lists them"
            )
        return details

    def jobs(self) -> list[JobDetails]:
        """All jobs that were submitted, the oldest first."""
        with self._translated():
            found = self._client.list_jobs()
        submitted = [details for details in found if details.submission_id is not None]
        return sorted(submitted, key=lambda details: (details.start_time or 0, str(details.submission_id)))

    def stop(self, submission_id: str) -> JobDetails:
        """Stops a job and waits for its end; one that has ended stays as it is.

        Raises:
            UsageError: if there is no such job.
            CsLocalizeError: if it goes on for a minute.
        """
        details = self.job(submission_id)
        if details.status.is_terminal():
            return details
        with self._translated():
            self._client.stop_job(submission_id)
        for _ in range(round(_STOP_PATIENCE_S / _POLL_S)):
            details = self.job(submission_id)
            if details.status.is_terminal():
                return details
            self._sleep(_POLL_S)
        raise CsLocalizeError(f"job '{submission_id}' was told to stop but still runs after {_STOP_PATIENCE_S:g} s")

    def logs(self, submission_id: str) -> str:
        """All that a job has printed.

        Raises:
            UsageError: if there is no such job.
        """
        self.job(submission_id)
        with self._translated():
            return str(self._client.get_job_logs(submission_id))

    def follow(self, submission_id: str, stream: TextIO) -> JobDetails:
        """Prints what a job prints, from its start until it ends.

        Raises:
            UsageError: if there is no such job.
            CsLocalizeError: if the server goes away; the job may go on.
        """
        printed = 0
        while True:
            details = self.job(submission_id)
            with self._translated():
                printed, whole = asyncio.run(self._tail(submission_id, printed, stream))
            if whole and details.status.is_terminal():  # as of before the reading, which thus had all
                return details
            self._sleep(_POLL_S)

    async def _tail(self, submission_id: str, skip: int, stream: TextIO) -> tuple[int, bool]:
        """Prints a job's log but for its first characters; returns how many it has so far, and whether that is all."""
        read, whole = 0, True
        try:
            async for text in self._client.tail_job_logs(submission_id):
                fresh = text[max(0, skip - read) :]
                read += len(text)
                stream.write(fresh)
                stream.flush()
        except RuntimeError:  # the connection broke; whether the server is still there, the next question tells
            whole = False
        return max(read, skip), whole

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """One line for whatever goes wrong between here and the server."""
        import aiohttp
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError:
            raise UsageError(_wants_token(self.address)) from None
        except (requests.RequestException, aiohttp.ClientError) as error:
            raise CsLocalizeError(
                f"the job server at {self.address} went away ({type(error).__name__}); jobs may still run there"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise CsLocalizeError(f"the job server at {self.address}: {_last_line(error)}") from None


def connect(address: str) -> JobServer:
    """Connects to the job server of a cluster.

    Args:
        address: such as ``http://127.0.0.1:8265``.

    Raises:
        UsageError: if no Ray job server answers there, or it asks for a token that is not had.
        CsLocalizeError: if Ray's packages for jobs are not installed.
    """
    if not address.startswith(("http://", "https://")):
        raise UsageError(f"--address {address}: write it as http://HOST:PORT, such as http://127.0.0.1:8265")
    address = address.rstrip("/")
    _knock(address)
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for module in _TALKATIVE:
        logging.getLogger(module).setLevel(logging.WARNING)
    try:
        with _without_ray_variables():
            return JobServer(JobSubmissionClient(address), address)
    except AuthenticationError:
        raise UsageError(_wants_token(address)) from None
    except ConnectionError as error:
        raise UsageError(_nobody(address, _last_line(error))) from None
    except RuntimeError as error:
        raise CsLocalizeError(_last_line(error)) from None


def exit_code(details: JobDetails) -> int:
    """The exit code of a job that ended, as the command would have returned it: 0, 2 for a usage error, or 1."""
    if details.status == "SUCCEEDED":
        return 0
    return 2 if details.status == "FAILED" and details.driver_exit_code == 2 else 1


def _knock(address: str) -> None:
    """Ray's client would wait for ever where something listens that does not answer."""
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=_KNOCK_S) as answer:
            known = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):  # it answers, and its client may know how to show who asks
            raise UsageError(_nobody(address, f"HTTP {error.code}")) from None
        return
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UsageError(_nobody(address, _last_line(error))) from None
    if not isinstance(known, dict) or "ray_version" not in known:
        raise UsageError(_nobody(address, "something else does"))


@contextmanager
def _without_ray_variables() -> Iterator[None]:
    """Ray's client lets its environment variables override the address it is given."""
    kept = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _nobody(address: str, reason: str) -> str:
    return (
        f"no Ray job server answers at {address} ({reason}); give its address with --address, "
        "or start a cluster with `ray start --head`"
    )


def _wants_token(address: str) -> str:
    return (
        f"the cluster at {address} asks for a token; set RAY_AUTH_MODE=token, and have its token in RAY_AUTH_TOKEN or "
        "in ~/.ray/auth_token"
    )


def _last_line(error: BaseException) -> str:
    """Of an error that may carry the server's whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" .")]
    return lines[-1] if lines else type(error).__name__
