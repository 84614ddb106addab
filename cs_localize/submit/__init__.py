"""Studies as jobs of a Ray cluster that is already running."""

from cs_localize.submit.server import JobServer, connect, exit_code
from cs_localize.submit.submission import Job, plan_job, submit_job

__all__ = ["Job", "JobServer", "connect", "exit_code", "plan_job", "submit_job"]
