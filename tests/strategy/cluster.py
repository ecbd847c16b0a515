"""A real SLURM cluster on this machine: a controller and several nodes, each a slurmd with its own hostname.

Everything runs as root in a separate process namespace. The first process of the namespace dies with the test run, and
the kernel then ends all daemons and jobs. No service and no fixed port of the system is used.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

REQUIRED = "LIGHTNING_SPARSE_NEEDS_SLURM"  # set if a missing SLURM is an error, as in continuous integration
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare", "setpriv")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job waits for this many seconds before it starts again: 120 unless set, and 5 at least.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=2
# The port at which a job's processes meet follows from its number, and two test runs may share a machine.
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 SocketsPerBoard=1"
    " CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
)
# First process of the namespace. It ends, and the kernel with it all others, when a daemon ends.
_FIRST_PROCESS = """\
set -eu
folder=$1
shift
# A directory that only root may enter is right here, so --force.
munged --foreground --force --num-threads=2 --key-file="$folder/munge.key" --socket="$folder/munge.socket" \\
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" &
until munge --no-input --socket="$folder/munge.socket" > /dev/null 2>&1; do
    kill -0 "$!"
    sleep 0.1
done
slurmctld -D -c &
for name in "$@"; do
    mkdir -p "$folder/spool.$name"
    unshare --uts --mount bash -c 'hostname "$1"; mount --bind "$0/hosts" /etc/hosts; exec slurmd -D -N "$1"' \\
        "$folder" "$name" &
done
wait -n
"""


def missing():
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if not sys.platform.startswith("linux"):
        lacking.append("Linux")
    elif os.geteuid() != 0:
        lacking.append("root")
    elif not lacking and subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        lacking.append("the right to make namespaces")
    return lacking


class Cluster:
    """Nodes ``n1``, ``n2``, ... with 2 CPUs each. All output goes to an empty folder."""

    def __init__(self, folder, nodes):
        self.folder = folder
        self.names = [f"n{number + 1}" for number in range(nodes)]
        ours = {name: os.environ[name] for name in os.environ if not name.startswith(("SLURM_", "SBATCH_", "MASTER_"))}
        self.environment = {**ours, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        self._write_files()
        # unshare dies with the test run, and the first process of the namespace with unshare.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["bash", "-c", _FIRST_PROCESS, "bash", str(folder), *self.names]
        with (folder / "daemons.log").open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        try:
            self.wait_for(self._has_idle_nodes, 60)
        except BaseException:
            self.stop()
            raise

    def run(self, *command, folder=None):
        done = subprocess.run(
            command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *options, folder):
        return self.run("sbatch", "--parsable", *options, folder=folder).strip()

    def wait_for(self, happened, timeout):
        """Return the first result that is true. Raise an error with the logs after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._process.poll() is None:
            if found := happened():
                return found
            time.sleep(0.3)
        raise TimeoutError(f"not within {timeout} s\n{self.logs()}")

    def record_of_ended(self, job):
        """Return SLURM's record of a job, or ``None`` before the end of the job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        facts = dict(word.split("=", 1) for word in words if "=" in word)
        return facts if facts["JobState"] in ENDED else None

    def logs(self):
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def stop(self):
        self._process.kill()
        self._process.wait(timeout=30)

    def _has_idle_nodes(self):
        asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
        told = subprocess.run(asked, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return told.stdout.split() == ["idle"] * len(self.names)

    def _write_files(self):
        controller_port, *ports = _free_ports(1 + len(self.names))
        configuration = _CONFIGURATION.format(
            host=socket.gethostname(),
            folder=self.folder,
            controller_port=controller_port,
            first_job=random.randrange(1000, 9000),
            nodes="\n".join(_NODE.format(name=name, port=port) for name, port in zip(self.names, ports)),
            names=",".join(self.names),
        )
        (self.folder / "slurm.conf").write_text(configuration)
        (self.folder / "state").mkdir()
        hosts = ["localhost", socket.gethostname(), *self.names]
        (self.folder / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in hosts))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))


def _path():
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def _free_ports(count):
    """Return free ports. All sockets stay open until the end, so that the ports differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
