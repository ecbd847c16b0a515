"""Count the kernels that a training step would launch on a GPU; no GPU, no network and no other rank is needed.

One process makes the steps of one of many ranks: its collectives answer as if every rank had handed in the same. Its
tensors say that they are a device's, so that all goes the way that it goes there. An operation of ATen is one launch,
those that are known to be several kernels count as many, see :class:`Launches`::

    python examples/benchmarks/launches.py                                 # calls / weighed launches / host waits
    python examples/benchmarks/launches.py --phases --systems "qsgd"       # weighed launches by phase
    python examples/benchmarks/launches.py --passes                        # passes over memory by phase
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional, Union
from unittest import mock

import torch
from echo import EchoCollectives, echo_pipeline
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from traffic import moved_bytes
from typing_extensions import override

from lightning_sparse import AdamCorrection, LocalSteps
from lightning_sparse.compressors import DGC, SDAGC, Compressor
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.adam.steps import AdamSteps
from lightning_sparse.engine.memory import residual
from lightning_sparse.engine.memory.residual import Memory
from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.shared_model import SharedModel
from lightning_sparse.engine.step.levels import FlatRanks, HierarchicalRanks
from lightning_sparse.engine.step.step import NOTHING_KNOWN, LocalGradient, Pipeline, StepContext
from lightning_sparse.engine.step.worker import Channel, ExchangeWorker
from lightning_sparse.functional import elements, segments
from lightning_sparse.schedule import Single

# BERT-large: the embeddings of words and positions, and 24 blocks of 16 tensors; 334 million elements.
_BLOCK = (1 << 20, 1 << 10) * 4 + (1 << 10, 1 << 10, 1 << 22, 1 << 12, 1 << 22, 1 << 10, 1 << 10, 1 << 10)
SIZES = (30522 << 10, 1 << 19, *_BLOCK * 24)
RANKS, NODE_RANKS = 64, 8
PHASES = ("compensate", "select", "encode, decode", "exchange", "commit", "optimizer")
_LIST = 100  # tensors that one launch of torch's multi-tensor kernels takes: 30 to 110 by operation
_SMALL = 1 << 15  # elements of a gradient that the exchange copies beside others; larger ones lie alone
_DENSE_STEPS, _STEPS = 2, 3  # the last counts: by then ExDyna has its threshold, and Adam's updates are corrected
_DIVISOR = 1 << 10  # of the sizes where every element has to be computed
_PRETENDED, _META = torch.device("cuda"), torch.device("meta")


class System(NamedTuple):
    """What is counted.

    Attributes:
        compressor: its name, or itself.
        density: of elements sent; ``None`` for a method without.
        exchange: how selections travel.
        waits: whether the host reads more of the device than whether a step is finite, so that there have to be values.
        is_corrected: whether AdamW's updates are made before selection.
        node_ranks: of these each has a share of every gradient, on two levels.
        groups: in which gradients travel, of as many tensors each.
        clip_norm: to which gradients are clipped.
        wire: name of the type of values.
        rounds: whose exchange is counted in a step's place.
    """

    compressor: Union[str, Compressor]
    density: Optional[float] = None
    exchange: str = "auto"
    waits: bool = False
    is_corrected: bool = False
    node_ranks: int = 1
    groups: int = 1
    clip_norm: Optional[float] = None
    wire: str = "float32"
    rounds: Optional[LocalSteps] = None

    @property
    def device(self) -> torch.device:
        """Where its tensors say that they are: without values, if nobody asks for them."""
        return _PRETENDED if self.waits else _META

    @property
    def divisor(self) -> int:
        """By what the sizes of tensors are divided."""
        return _DIVISOR if self.waits else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of its tensors."""
        return tuple(size // self.divisor for size in SIZES)

    def settings(self) -> Settings:
        """Return what a user would choose."""
        correction = AdamCorrection(dense_steps=_DENSE_STEPS, fall_steps=0) if self.is_corrected else "auto"
        settings = Settings.of(
            self.compressor,
            self.density,
            schedule="single",
            wire=self.wire,
            warmup_epochs=0,
            optimizer_correction=correction,
            exchange=self.exchange,
            local_steps=1 if self.rounds is None else self.rounds,
        )
        return settings.correcting_adam() if self.is_corrected else settings


SYSTEMS = {
    "topk 0.001, gather": System("topk", 0.001, "gather"),
    "topk 0.001, owners": System("topk", 0.001, "owners"),
    "topk 0.01, gather": System("topk", 0.01, "gather"),
    "topk 0.01, owners": System("topk", 0.01, "owners"),
    "lags 0.001, 16 groups": System("lags", 0.001, "gather", groups=16),
    "lags 0.001, clipped": System("lags", 0.001, "gather", clip_norm=1.0),
    "omgs 0.001, gather": System("omgs", 0.001, "gather"),
    "dgc 0.001, gather": System(DGC(momentum=0.9), 0.001, "gather"),
    "sdagc 0.001, gather": System(SDAGC(momentum=0.9), 0.001, "gather"),
    "exdyna 0.001": System("exdyna", 0.001, waits=True),
    "micro 0.001": System("micro", 0.001, waits=True),
    "qsgd": System("qsgd"),
    "a2sgd": System("a2sgd"),
    "dense": System("dense"),
    "diloco, a round": System("dense", rounds=LocalSteps(50, outer_lr=0.7, outer_momentum=0.9, nesterov=True)),
    "loco, a round": System("topk", 1 / 64, wire="2bit", rounds=LocalSteps(30, residual_decay=0.95)),
}
_LEFT_TO_ADAM = ("a2sgd", "dense", "qsgd", "diloco, a round", "loco, a round")  # which act on what is exchanged
_ONE_LEVEL = ("a2sgd",)  # whose ranks have replicas of their own


class OnDevice(Tensor):
    """A tensor of the host that says it is a GPU's; so does what is computed from it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that it is said to be on."""
        return _PRETENDED


class Launches(TorchDispatchMode):
    """Count the launches of what is done inside, by phase.

    An operation of ATen on tensors of a device is one call: arithmetic, copies (also from and to the host), fills,
    sorts, top-k. None are those that make a view, tell a size, or take memory without filling it, and those of which
    the result has no element. One that takes a list of tensors (``_foreach_add_``, ``cat``, ``stack``) is a call for
    every hundred begun, or for each tensor where some are not contiguous. Weighed, a call counts as the kernels that
    it is known to be: an ``index_put_`` that accumulates 20, a sort 8, a top-k 12. A list of large tensors takes more
    launches than one of small ones, which is left out.

    Args:
        tensors_a_launch: how many tensors of a list one launch takes.

    Attributes:
        phase: of what is done now.
        calls: by phase.
        weighed: launches by phase.
        waits: how often the host waited for the device, by the name of the operation: also to copy from the host.
        moved: bytes read and written by phase, see :func:`traffic.moved_bytes`.
    """

    def __init__(self, tensors_a_launch: int = _LIST) -> None:
        super().__init__()
        self.phase = ""
        self.calls: Counter[str] = Counter()
        self.weighed: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.is_on_device = False
        self._tensors_a_launch = tensors_a_launch
        self._functions = _Functions(self)

    def clear(self) -> None:
        """Start anew."""
        for counter in (self.calls, self.weighed, self.waits, self.moved):
            counter.clear()

    def add(self, calls: int = 1, kernels: int = 1, moved: int = 0) -> None:
        """Count calls of so many kernels each, and the bytes that they move together."""
        self.calls[self.phase] += calls
        self.weighed[self.phase] += calls * kernels
        self.moved[self.phase] += moved

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
                self.add(
                    tensors if is_one_by_one else -(-tensors // self._tensors_a_launch),
                    _kernels(name, args, kwargs),
                    moved_bytes(func, args, kwargs or {}, result),
                )
        return result


_KERNELS = {"sort": 8, "_unique2": 8, "topk": 12}
_ACCUMULATING = 20  # of an index_put_, which sorts


def _kernels(name: str, args: tuple[Any, ...], kwargs: Optional[dict[str, Any]]) -> int:
    if name.lstrip("_").startswith("index_put"):
        return _ACCUMULATING if (args[3:] or ((kwargs or {}).get("accumulate", False),))[0] else 1
    return _KERNELS.get(name, 1)


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
        if _waits_to_copy(name, devices, asked, kwargs):
            launches.waits[name] += 1
        is_pretended = _PRETENDED in devices | asked
        return tree_map(_said_to_be_on_device, result) if is_pretended else result


_HOST = torch.device("cpu")


def _waits_to_copy(name: str, devices: set[Any], asked: set[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call copies from the host's pageable memory, and returns when that is done."""
    if name in ("new_tensor", "tensor", "as_tensor"):
        return True
    return name in ("to", "cuda") and devices == {_HOST} and bool(asked - devices) and not kwargs.get("non_blocking")


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
    small: int = _SMALL,
    tensors_a_launch: int = _LIST,
) -> Launches:
    """Make steps as one of so many ranks, and count the last; of rounds, the last.

    Args:
        system: what is counted.
        ranks: how many are played.
        sizes: elements of the tensors, in the order of definition; ``None`` for the system's own.
        small: elements below which tensors of a group lie side by side, of those of BERT-large.
        tensors_a_launch: see :class:`Launches`.
    """
    sizes = system.sizes if sizes is None else sizes
    launches = Launches(tensors_a_launch)
    sizes_of_pieces = {name: getattr(elements, name) // system.divisor for name in ("_PIECE", "_ALONE")}
    apart = elements.APART // system.divisor
    with (
        launches,
        torch.no_grad(),
        mock.patch.object(torch, "Generator", _HostGenerator),
        mock.patch.multiple(elements, **sizes_of_pieces),
        mock.patch.object(residual, "APART", apart),
        mock.patch.object(segments, "APART", apart),
    ):
        pipeline = _pipeline(system, sizes, ranks, launches)
        if system.rounds is None:
            make_step = _steps(pipeline, system, sizes, launches, small // system.divisor)
        else:
            make_step = _rounds(pipeline, system, sizes, launches)
        for step in range(_STEPS):
            make_step(step)
    return launches


def _pipeline(system: System, sizes: Sequence[int], ranks: int, launches: Launches) -> Pipeline:
    def channel(of: int) -> Channel:
        return Channel(CountedCollectives(of, system.device, launches), recorder)

    recorder = PhaseRecorder(launches)
    levels = FlatRanks(channel(ranks))
    if system.node_ranks > 1:
        levels = HierarchicalRanks(channel(system.node_ranks), channel(ranks // system.node_ranks), channel(ranks))
    pipeline = echo_pipeline(system.settings(), sizes, levels, system.device)
    pipeline.memory.compensate = launches.during("compensate")(pipeline.memory.compensate)  # type: ignore[method-assign]
    return pipeline


def _steps(
    pipeline: Pipeline, system: System, sizes: Sequence[int], launches: Launches, small: int
) -> Callable[[int], None]:
    adam = _CorrectedAdam(pipeline.memory, sizes, system) if system.is_corrected else None

    def make_step(step: int) -> None:
        gradients = _gradients(sizes, system, small)
        context = NOTHING_KNOWN if adam is None else adam.context(step)
        launches.clear()
        pipeline.begin_step(context)
        _make_step(pipeline, gradients, launches, system.groups)
        if adam is not None:
            with launches.during("optimizer"):
                adam.step(gradients)

    return make_step


def _rounds(pipeline: Pipeline, system: System, sizes: Sequence[int], launches: Launches) -> Callable[[int], None]:
    module = nn.ParameterList([nn.Parameter(torch.zeros(size, device=system.device)) for size in sizes])
    names = [name for name, _ in module.named_parameters()]
    assert system.rounds is not None
    shared = SharedModel(module, names, system.rounds, pipeline, Single(), _Inline())

    def make_round(_: int) -> None:
        launches.clear()
        with launches.during("commit"):
            change = shared.change(is_late=False)
            shared.exchange(change, 1.0, lambda: NOTHING_KNOWN)
            shared.apply(change)

    return make_round


class _Inline(ExchangeWorker):
    """A worker that nothing is left to."""

    def __init__(self) -> None:
        self.error = None


class _HostGenerator(torch.Generator):
    """A generator of the host, whichever device is asked for; a class, as modules imported meanwhile name it a type."""

    def __new__(cls, device: torch.device) -> "_HostGenerator":
        return super().__new__(cls, _HOST)  # type: ignore[call-arg]  # which torch annotates as taking none


def _gradients(sizes: Sequence[int], system: System, small: int) -> dict[int, Tensor]:
    """Return gradients by place, the last first, as from backward, the small ones of a group side by side."""
    order = range(len(sizes) - 1, -1, -1)
    gradients: dict[int, Tensor] = {}
    for group in _groups(order, system.groups):
        beside = [place for place in group if sizes[place] < small]
        numels = [sizes[place] for place in beside]
        together = dict(zip(beside, torch.randn(sum(numels), device=system.device).split(numels)))
        for place in group:
            gradients[place] = together[place] if place in together else torch.randn(sizes[place], device=system.device)
    return gradients


def _groups(places: Sequence[Any], groups: int) -> Iterator[Sequence[Any]]:
    size = -(-len(places) // groups)
    return (places[start : start + size] for start in range(0, len(places), size))


def _make_step(pipeline: Pipeline, gradients: Mapping[int, Tensor], launches: Launches, groups: int) -> None:
    members = [LocalGradient(str(place), gradient, True) for place, gradient in gradients.items()]
    with launches.during("encode, decode"):
        if pipeline.memory.clips_gradients:
            pipeline.measure_norms(members)
        exchanged = [part for group in _groups(members, groups) for part in pipeline.exchange(group)]
    with launches.during("commit"):
        pipeline.commit(exchanged)
        pipeline.recorder.end_exchange()


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
        self._steps = AdamSteps([self._optimizer], self._names, lambda name: 0.5, memory, system.clip_norm)

    def context(self, step: int) -> StepContext:
        """Return what the exchange is told: in the first step, to send everything."""
        if not step:
            return StepContext(dense=frozenset(self._names.values()))
        return self._steps.coming(is_dense=False)

    def step(self, gradients: Mapping[int, Tensor]) -> None:
        """Make a step."""
        for place, gradient in gradients.items():
            self._parameters[place].grad = gradient
        self._steps.note_arrived()
        self._optimizer.step()


def by_way(systems: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table of calls, weighed launches and host waits of a step."""
    ways: dict[str, dict[str, Any]] = {
        "SGD": {},
        "SGD, two levels": {"node_ranks": NODE_RANKS},
        "AdamW": {"is_corrected": True},
        "AdamW, two levels": {"is_corrected": True, "node_ranks": NODE_RANKS},
    }
    yield f"| {len(SIZES)} tensors, {RANKS} ranks | {' | '.join(ways)} |"
    yield "| --- |" + " ---: |" * len(ways)
    for name in systems:
        cells = []
        for changed in ways.values():
            is_left = "is_corrected" in changed and name in _LEFT_TO_ADAM
            is_left = is_left or ("node_ranks" in changed and name in _ONE_LEVEL)
            is_left = is_left or ("is_corrected" not in changed and SYSTEMS[name].clip_norm is not None)
            cells.append("" if is_left else _told(launches_of_a_step(SYSTEMS[name]._replace(**changed))))
        yield f"| {name} | {' | '.join(cells)} |"


def _told(counted: Launches) -> str:
    return f"{counted.calls.total()} / {counted.weighed.total()} / {counted.waits.total()}"


def by_phase(systems: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table of the weighed launches of a step by phase."""
    yield f"| {len(SIZES)} tensors, {RANKS} ranks | {' | '.join((*PHASES, 'weighed', 'calls', 'host waits'))} |"
    yield "| --- |" + " ---: |" * (len(PHASES) + 3)
    for name in systems:
        counted = launches_of_a_step(SYSTEMS[name])
        cells = [counted.weighed[phase] for phase in PHASES]
        cells += [counter.total() for counter in (counted.weighed, counted.calls, counted.waits)]
        yield f"| {name} | {' | '.join(map(str, cells))} |"


def passes_by_phase(systems: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table of passes over memory of a step: bytes that it moves by those of the model in fp32."""
    yield f"| passes over {sum(SIZES):,} elements, {RANKS} ranks | {' | '.join((*PHASES, 'all'))} |"
    yield "| --- |" + " ---: |" * (len(PHASES) + 1)
    for name in systems:
        for is_corrected in (False, True) if name not in _LEFT_TO_ADAM else (False,):
            passes = passes_of(SYSTEMS[name]._replace(is_corrected=is_corrected))
            cells = [f"{passes[phase]:.1f}" for phase in PHASES] + [f"{sum(passes.values()):.1f}"]
            yield f"| {name}{', AdamW' if is_corrected else ''} | {' | '.join(cells)} |"


def passes_of(system: System, ranks: int = RANKS) -> dict[str, float]:
    """Return passes over memory by phase; an optimizer that is left to itself, with SGD 3, is not counted."""
    moved = launches_of_a_step(system, ranks).moved
    return {phase: moved[phase] / (4 * sum(system.sizes)) for phase in PHASES}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--phases", action="store_true", help="print a step with SGD by phase")
    parser.add_argument("--passes", action="store_true", help="print passes over memory by phase")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = passes_by_phase if options.passes else by_phase if options.phases else by_way
    for line in table(options.systems):
        print(line, flush=True)


if __name__ == "__main__":
    main()
