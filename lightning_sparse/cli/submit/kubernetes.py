"""The manifest of a job of Kubernetes, as text: a JobSet, whose pods find each other by name."""

import json
import re
import textwrap

from lightning_sparse.cli.submit.job import Job, Training, parse_time
from lightning_sparse.cli.submit.torchrun import PORT, torchrun_command

_LONGEST_NAME = 40  # the pods' names, of 63 letters at most, go on with -nodes-0-, a number and five letters
_PLACE = "/jobs"  # of the volume, within each pod


def job_set(job: Job, training: Training) -> str:
    """Compose what ``kubectl create`` takes, for a training that fits the job.

    Raises:
        ValueError: without an image, or for a name that Kubernetes does not take.
    """
    if job.container_image is None:
        raise ValueError("--to kubernetes needs --container-image, with this package, your code and its configuration")
    for option, name in (("--job-name", job.name), ("--volume-claim", job.volume_claim)):
        if name is not None and not re.fullmatch(rf"[a-z](?:[a-z0-9-]{{0,{_LONGEST_NAME - 2}}}[a-z0-9])?", name):
            raise ValueError(
                f"{option} {name!r} must be a name of Kubernetes: small letters, digits and '-', a letter first,"
                f" {_LONGEST_NAME} in all at most"
            )
    return _MANIFEST.format(
        name=job.name,
        nodes=job.nodes,
        limit="" if job.time is None else f"          activeDeadlineSeconds: {parse_time(job.time)}\n",
        image=json.dumps(job.container_image),
        script=textwrap.indent(_script(job, training), " " * 22),
        resources=_resources(job),
        mount="" if job.volume_claim is None else _MOUNT.format(place=_PLACE),
        volume=_NO_VOLUME if job.volume_claim is None else _VOLUME.format(claim=job.volume_claim),
    )


_MANIFEST = """\
# Written by lightning-sparse submit; `kubectl create -f` takes it as it is, where JobSet is installed.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  # Where one process fails, all end: the others could not go on without it.
  failurePolicy:
    maxRestarts: 0
  # Each pod has a name, by which the others find the first.
  network:
    enableDNSHostnames: true
  replicatedJobs:
    - name: nodes
      replicas: 1
      template:
        spec:
          # A pod for each node, of which each knows its number: JOB_COMPLETION_INDEX.
          completionMode: Indexed
          parallelism: {nodes}
          completions: {nodes}
          backoffLimit: 0
{limit}          template:
            spec:
              restartPolicy: Never
              # Each on a machine of its own, or two of them would share its network.
              affinity:
                podAntiAffinity:
                  requiredDuringSchedulingIgnoredDuringExecution:
                    - topologyKey: kubernetes.io/hostname
                      labelSelector:
                        matchLabels:
                          jobset.sigs.k8s.io/jobset-name: {name}
              containers:
                - name: training
                  image: {image}
                  command: ["bash", "-c"]
                  args:
                    - |
{script}
{resources}                  volumeMounts:
                    # Processes of a pod share memory, of which a container has 64 MiB unless it is said.
                    - name: shared-memory
                      mountPath: /dev/shm
{mount}              volumes:
                - name: shared-memory
                  emptyDir:
                    medium: Memory
{volume}"""
_MOUNT = """\
                    - name: saved
                      mountPath: {place}
"""
_VOLUME = """\
                - name: saved
                  persistentVolumeClaim:
                    claimName: {claim}
"""
_NO_VOLUME = """\
                # What is saved goes with the pods: --volume-claim keeps it.
"""


def _script(job: Job, training: Training) -> str:
    root = None
    if training.root is None:
        root = f"{'jobs' if job.volume_claim is None else _PLACE}/{job.name}"
    lines = ["set -eo pipefail", *job.interface_lines]
    if job.cpus_per_task is not None:
        lines.append(f"export OMP_NUM_THREADS={job.threads}")
    first = f"{job.name}-nodes-0-0.{job.name}"
    command = torchrun_command(job, training, '"$JOB_COMPLETION_INDEX"', first, str(PORT), root)
    return "\n".join([*lines, *job.setup, command])


def _resources(job: Job) -> str:
    lines = []
    if job.cpus_per_task is not None:
        lines += ["  requests:", f"    cpu: {job.cpus_per_task * job.tasks_per_node}"]
    if job.on_gpus:
        lines += ["  limits:", f"    nvidia.com/gpu: {job.tasks_per_node}"]
    return textwrap.indent("\n".join(["resources:", *lines, ""]), " " * 18) if lines else ""
