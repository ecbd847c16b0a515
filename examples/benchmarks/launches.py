"""Count the kernels that a training step would launch on a GPU; no GPU, no network and no other rank is needed.

One process makes the steps of one of many ranks: its collectives answer as if every rank had handed in the same. Its
tensors say that they are a device's, so that all goes the way that it goes there. An operation of ATen is one launch,
see :class:`Launches`::

    python examples/benchmarks/launches.py
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional
from unittest import mock

import torch
import torch.distributed as dist
from echo import EchoCollectives, echo_pipeline
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_sparse import AdamCorrection
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.adam.steps import AdamSteps
from lightning_sparse.engine.memory.residual import Memory
from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.levels import FlatRanks
from lightning_sparse.engine.step.step import LocalGradient, Pipeline, StepContext
from lightning_sparse.engine.step.worker import Channel

# BERT-large: the embeddings of words and positions, and 24 blocks of 16 tensors; 334 million elements.
_BLOCK = (1 << 20, 1 << 10) * 4 + (1 << 10, 1 << 10, 1 << 22, 1 << 12, 1 << 22, 1 << 10, 1 << 10, 1 << 10)
SIZES = (30522 << 10, 1 << 19, *_BLOCK * 24)
RANKS = 64
PHASES = ("compensate", "select", "encode, decode", "exchange", "commit", "optimizer")
_LIST = 100  # tensors that one launch of torch's multi-tensor kernels takes: 30 to 110 by operation
_BUCKET_MB = 1  # DDP's, as the strategy asks for them
_DENSE_STEPS, _STEPS = 2, 3  # the last counts: by then ExDyna has its threshold, and Adam's updates are corrected
_DIVISOR = 1 << 10  # of the sizes where every element has to be computed
_PRETENDED, _META = torch.device("cuda"), torch.device("meta")


class System(NamedTuple):
    """What is counted.

    Attributes:
        compressor: its name.
        density: of elements sent; ``None`` for a method without.
        exchange: how selections travel.
        is_corrected: whether AdamW's updates are made before selection.
        waits: whether the host reads more of the device than whether a step is finite, so that there have to be values.
    """

    compressor: str
    density: Optional[float] = None
    exchange: str = "auto"
    is_corrected: bool = False
    waits: bool = False

    @property
    def device(self) -> torch.device:
        """Where its tensors say that they are: without values, if nobody asks for them."""
        return _PRETENDED if self.waits else _META

    @property
    def divisor(self) -> int:
        """By what the sizes of tensors are divided, and of buckets."""
        return _DIVISOR if self.waits else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of its tensors."""
        return tuple(size // self.divisor for size in SIZES)


SYSTEMS = {
    "topk 0.001, gather": System("topk", 0.001, "gather"),
    "topk 0.001, owners": System("topk", 0.001, "owners"),
    "topk 0.01, gather": System("topk", 0.01, "gather"),
    "topk 0.01, owners": System("topk", 0.01, "owners"),
    "lags 0.001, gather": System("lags", 0.001, "gather"),
    "lags 0.001, gather, AdamW corrected": System("lags", 0.001, "gather", is_corrected=True),
    "omgs 0.001, gather": System("omgs", 0.001, "gather"),
    "dgc 0.001, gather": System("dgc", 0.001, "gather"),
    "sdagc 0.001, gather": System("sdagc", 0.001, "gather"),
    "exdyna 0.001": System("exdyna", 0.001, waits=True),
    "micro 0.001": System("micro", 0.001, waits=True),
    "qsgd": System("qsgd"),
    "a2sgd": System("a2sgd"),
    "dense": System("dense"),
}


class OnDevice(Tensor):
    """A tensor of the host that says it is a GPU's; so does what is computed from it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that it is said to be on."""
        return _PRETENDED


class Launches(TorchDispatchMode):
    """Count the launches of what is done inside, by phase.

    An operation of ATen on tensors of a device is one launch: arithmetic, copies (also from and to the host), fills,
    sorts, top-k. None are those that make a view, tell a size, or take memory without filling it, and those of which
    the result has no element. One that takes a list of tensors (``_foreach_add_``, ``cat``, ``stack``) is a launch for
    every hundred begun, or for each tensor where some are not contiguous. So it is a count of calls: a sort, a top-k
    or an ``index_put_`` is several kernels, and a list of large tensors takes more launches than one of small ones.

    Args:
        tensors_a_launch: how many tensors of a list one launch takes.

    Attributes:
        phase: of what is done now.
        by_phase: launches.
        waits: how often the host waited for the device, by the name of the operation.
    """

    def __init__(self, tensors_a_launch: int = _LIST) -> None:
        super().__init__()
        self.phase = ""
        self.by_phase: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.is_on_device = False
        self._tensors_a_launch = tensors_a_launch
        self._functions = _Functions(self)

    def clear(self) -> None:
        """Start anew."""
        for counter in (self.by_phase, self.waits):
            counter.clear()

    def add(self, launches: int = 1) -> None:
        """Count."""
        self.by_phase[self.phase] += launches

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what is done inside as a phase of its own."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @override
    def __enter__(self) -> "Launches":
        self._functions.__enter__()
        super().__enter__()
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on_device:
            name = func.overloadpacket.__name__
            if name in _READ or (name == "index" and any(_is_mask(index) for index in args[1])):
                self.waits[name] += 1
            if not (func.is_view or name in _WITHOUT_LAUNCH or _is_empty(result)):
                tensors = max(map(_listed, args), default=1)
                is_one_by_one = name.startswith("_foreach") and any(map(_is_laid_otherwise, args))
                self.add(tensors if is_one_by_one else -(-tensors // self._tensors_a_launch))
        return result


_READ = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select")
_WITHOUT_LAUNCH = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view")


def _leaves(*arguments: Any) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _leaves(*argument)
        else:
            yield argument


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_empty(result: Any) -> bool:
    tensors = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def _listed(argument: Any) -> int:
    is_list = isinstance(argument, (list, tuple)) and len(argument) > 0 and isinstance(argument[0], Tensor)
    return len(argument) if is_list else 1


def _is_laid_otherwise(argument: Any) -> bool:
    """Return whether torch takes the tensors of a list one by one, as they do not lie in memory as it wants them."""
    return isinstance(argument, (list, tuple)) and not all(
        each.is_contiguous() for each in argument if isinstance(each, Tensor)
    )


class _Functions(TorchFunctionMode):
    """See which calls are made for a device, and answer those for the pretended one in the host's memory."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = list(_leaves(args, *kwargs.values()))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        asked = {leaf for leaf in leaves if isinstance(leaf, torch.device)}
        if all(device.type == "cpu" for device in devices | asked):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if devices == {_META} and name in ("__bool__", "__int__"):  # whether the step is finite
            self._launches.add()
            self._launches.waits[name] += 1
            return name == "__bool__" or 1
        if _PRETENDED in asked:
            args, kwargs = tree_map(_in_host_memory, (args, kwargs))
        launches, is_copied = self._launches, _PRETENDED in asked and devices == {_HOST}
        launches.is_on_device = True
        try:
            result = func(*args, **kwargs)
        finally:
            launches.is_on_device = False
        if is_copied or name in ("cpu", "tolist"):
            launches.add()
        if name in ("cpu", "tolist"):
            launches.waits[name] += 1
            return result.as_subclass(Tensor) if name == "cpu" else result
        is_pretended = _PRETENDED in devices | asked
        return tree_map(_said_to_be_on_device, result) if is_pretended else result


_HOST = torch.device("cpu")


def _in_host_memory(argument: Any) -> Any:
    return _HOST if argument == _PRETENDED and isinstance(argument, torch.device) else argument


def _said_to_be_on_device(result: Any) -> Any:
    return result.as_subclass(OnDevice) if type(result) is Tensor else result


class PhaseRecorder(Recorder):
    """A recorder that tells in which stage of a step something is done."""

    def __init__(self, launches: Launches) -> None:
        super().__init__(_HOST, RANKS)
        self._launches = launches

    @override
    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        with self._launches.during("encode, decode" if stage == "encode" else stage), super().span(stage):
            yield


class CountedCollectives(EchoCollectives):
    """Collectives of which each is one launch."""

    def __init__(self, ranks: int, device: torch.device, launches: Launches) -> None:
        super().__init__(ranks, device)
        self._launches = launches

    @override
    def run(self, name: str, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        with mock.patch.object(self._launches, "add"):  # what it takes to echo is not the step's
            received = super().run(name, tensor, out)
        self._launches.add()
        return received


def launches_of_a_step(
    system: System,
    ranks: int = RANKS,
    sizes: Optional[Sequence[int]] = None,
    bucket_mb: float = _BUCKET_MB,
    tensors_a_launch: int = _LIST,
) -> Launches:
    """Make steps as one of so many ranks, and count the last.

    Args:
        system: what is counted.
        ranks: how many are played.
        sizes: elements of the tensors, in the order of definition; ``None`` for the system's own.
        bucket_mb: size from which on a bucket of DDP is handed over; what is in one lies side by side in memory.
        tensors_a_launch: see :class:`Launches`.
    """
    sizes = system.sizes if sizes is None else sizes
    launches = Launches(tensors_a_launch)
    correction = AdamCorrection(dense_steps=_DENSE_STEPS, fall_steps=0) if system.is_corrected else "auto"
    settings = Settings.of(
        system.compressor,
        system.density,
        schedule="single",
        warmup_epochs=0,
        optimizer_correction=correction,
        exchange=system.exchange,
    )
    if system.is_corrected:
        settings = settings.correcting_adam()
    with launches, mock.patch.object(torch, "Generator", _HostGenerator):
        pipeline = echo_pipeline(settings, sizes, ranks, system.device)
        pipeline.recorder = PhaseRecorder(launches)
        collectives = CountedCollectives(ranks, system.device, launches)
        pipeline.levels = FlatRanks(Channel(collectives, pipeline.recorder))
        adam = _CorrectedAdam(pipeline.memory, sizes, system) if system.is_corrected else None
        compensate = launches.during("compensate")(pipeline.memory.compensate)
        with mock.patch.object(pipeline.memory, "compensate", compensate):
            for step in range(_STEPS):
                gradients = _gradients(sizes, bucket_mb / system.divisor, system.device)
                if adam is not None:
                    pipeline.context = adam.context(step)
                launches.clear()
                _make_step(pipeline, gradients, launches)
                if adam is not None:
                    with launches.during("optimizer"):
                        adam.step(gradients)
    return launches


class _HostGenerator(torch.Generator):
    """A generator of the host, whichever device is asked for; a class, as modules imported meanwhile name it a type."""

    def __new__(cls, device: torch.device) -> "_HostGenerator":
        return super().__new__(cls, _HOST)  # type: ignore[call-arg]  # which torch annotates as taking none


def _gradients(sizes: Sequence[int], bucket_mb: float, device: torch.device) -> dict[int, Tensor]:
    """Return gradients by place, the last first, as from backward, in buckets as DDP cuts them."""
    order = range(len(sizes) - 1, -1, -1)
    shapes = [torch.empty(sizes[place], device=_META) for place in order]
    limits = [max(1, int(bucket_mb * (1 << 20)))]
    buckets, _ = dist._compute_bucket_assignment_by_size(shapes, limits)  # type: ignore[attr-defined]
    gradients: dict[int, Tensor] = {}
    for bucket in buckets:
        places = [order[each] for each in bucket]
        numels = [sizes[place] for place in places]
        gradients.update(zip(places, torch.randn(sum(numels), device=device).split(numels)))
    return gradients


def _make_step(pipeline: Pipeline, gradients: Mapping[int, Tensor], launches: Launches) -> None:
    group = [LocalGradient(str(place), gradient, None) for place, gradient in gradients.items()]
    with launches.during("encode, decode"):
        exchanged = list(pipeline.exchange(group))
    with launches.during("commit"):
        pipeline.commit(exchanged)
        pipeline.recorder.end_step()


class _CorrectedAdam:
    """AdamW in the steps before and after its updates are made before selection."""

    def __init__(self, memory: Memory, sizes: Sequence[int], system: System) -> None:
        self._parameters = [nn.Parameter(torch.zeros(size, device=system.device)) for size in sizes]
        self._optimizer = torch.optim.AdamW(self._parameters, foreach=True)
        for parameter in self._parameters:
            moments = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(_DENSE_STEPS)), **moments}
        self._names = {parameter: str(place) for place, parameter in enumerate(self._parameters)}
        assert isinstance(memory, AdamMemory)
        self._steps = AdamSteps([self._optimizer], self._names, lambda name: 0.5, memory)

    def context(self, step: int) -> StepContext:
        """Return what the exchange is told: in the first step, to send everything."""
        if not step:
            return StepContext(dense=frozenset(self._names.values()))
        return self._steps.coming(is_dense=False)

    def step(self, gradients: Mapping[int, Tensor]) -> None:
        """Make a step."""
        for place, gradient in gradients.items():
            self._parameters[place].grad = gradient
        self._optimizer.step()


def by_phase(systems: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table of the launches of a step by phase."""
    columns = (*PHASES, "all", "all, 25 MiB buckets", "all, one bucket", "host waits")
    yield f"| {len(SIZES)} tensors, {RANKS} ranks, one group | {' | '.join(columns)} |"
    yield "| --- |" + " ---: |" * len(columns)
    for name in systems:
        counted, *others = (launches_of_a_step(SYSTEMS[name], bucket_mb=size) for size in (_BUCKET_MB, 25, 1 << 20))
        cells = [counted.by_phase[phase] for phase in PHASES]
        cells += [each.by_phase.total() for each in (counted, *others)]
        yield f"| {name} | {' | '.join(map(str, cells))} | {counted.waits.total()} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    options = parser.parse_args()
    torch.manual_seed(0)
    for line in by_phase(options.systems):
        print(line, flush=True)


if __name__ == "__main__":
    main()
