"""The command ``lightning-sparse submit``: checks a fit against its job, and sends it to a cluster."""

from lightning_sparse.cli.submit.command import submit
from lightning_sparse.cli.submit.job import Job, parse_time
from lightning_sparse.cli.submit.script import job_script
from lightning_sparse.cli.submit.step import check_step

__all__ = ["Job", "check_step", "job_script", "parse_time", "submit"]
