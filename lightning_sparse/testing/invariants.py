"""Invariants of compressors, checked by short trainings in real processes, with several schedules and wires."""

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.requirements import takes_wire
from lightning_sparse.engine.wire import WIRES
from lightning_sparse.schedule import FixedSize, Schedule
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.tensors import DEVICE, assert_same, differences, moved
from lightning_sparse.testing.wrapping import (
    Edges,
    Subject,
    Tensors,
    backpropagate,
    batch,
    booked_step,
    density_for,
    gradients_of,
    parameters_of,
    residuals_like,
    settings_of,
    sparse_ddp,
    subject_of,
    watch_gradients,
)


class InvariantError(AssertionError):
    """A compressor violates an invariant. The message names the invariant and the case, and shows the wrong result."""


class Check(NamedTuple):
    """An invariant of a compressor in a single case. ``check(pool)`` raises :class:`InvariantError` on a violation.

    Attributes:
        holds: function of this module that asserts the invariant.
        compressor: the compressor under test.
        case: arguments of ``holds``, such as schedule and wire, and ``ranks``, the number of ranks (default: 2).
    """

    holds: Callable[..., None]
    compressor: Subject
    case: dict[str, Any]

    def __call__(self, pool: Pool) -> None:
        """Run the check in the first ``ranks`` processes of a pool. The pool must have at least three processes."""
        case = dict(self.case)
        try:
            self.holds(pool.first(case.pop("ranks", 2)), self.compressor, **case)
        except AssertionError as error:
            raise InvariantError(f"{self} does not hold: {error}") from error

    def __str__(self) -> str:
        name = self.compressor if isinstance(self.compressor, str) else type(subject_of(self.compressor)).__name__
        return "-".join([self.holds.__name__, name, *map(str, self.case.values())])


def check_compressor(compressor: Subject, timeout: float = 120.0) -> None:
    """Check every invariant of a compressor in three new gloo processes.

    Args:
        compressor: a compressor, a registered name, or a class or function that needs no arguments. The processes
            import the compressor's module: call this function in a test, or under ``if __name__ == "__main__":``.
        timeout: seconds for each run of the processes.

    Raises:
        InvariantError: for the first violation.
    """
    pool = Pool(3, timeout)
    try:
        for check in checks_for(compressor):
            check(pool)
    finally:
        pool.stop()


def checks_for(compressor: Subject) -> list[Check]:
    """Return one check for each case of each invariant. Class attributes of the compressor exclude invariants."""
    subject = subject_of(compressor)
    return [
        Check(holds, compressor, case)
        for holds, is_promised, cases in _INVARIANTS
        if is_promised(subject)
        for case in cases
        if takes_wire(subject, case.get("wire", "float32"))
    ]


_Cases = Sequence[dict[str, Any]]
_Promise = Callable[[Compressor], bool]
_INVARIANTS: list[tuple[Callable[..., None], _Promise, _Cases]] = []
_WAYS = [  # cases with every schedule and every wire
    {"schedule": "merged", "wire": "float32", "ranks": 2},
    {"schedule": "layerwise", "wire": "bfloat16", "ranks": 3},
    {"schedule": "single", "wire": "float16", "ranks": 2},
    {"schedule": "layerwise", "wire": "2bit", "ranks": 3},
    {"schedule": "single", "wire": "4bit", "ranks": 2},
]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WIRES = [{"wire": way["wire"], "ranks": way["ranks"]} for way in _WAYS]


def _invariant(cases: _Cases, is_promised: _Promise = lambda compressor: True) -> Callable[..., Callable[..., None]]:
    def enter(holds: Callable[..., None]) -> Callable[..., None]:
        _INVARIANTS.append((holds, is_promised, cases))
        return holds

    return enter


def balance(rank: int, settings: dict[str, Any], steps: int, momentum: float = 0.0) -> list[dict[str, Tensors]]:
    """Train for ``steps`` steps. For each, return the result of :func:`booked_step`, and the parameters afterwards."""
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=momentum)
        gradients = watch_gradients(ddp.module)
        for step in range(steps):
            entry = booked_step(ddp, engine, gradients, ddp(batch(rank, step)))
            optimizer.step()
            book.append({**entry, "parameters": parameters_of(ddp)})
    return book


@_invariant(_WAYS, lambda compressor: compressor.feedback.keeps_residual)
def mass_is_conserved(pool: Pool, compressor: Subject, **way: str) -> None:
    """Residual before a step + gradient = sent values + residual after the step, as means over ranks."""
    assert_mass_is_conserved(pool.run(balance, settings_of(compressor, **way), 4))


def assert_mass_is_conserved(books: list[list[dict[str, Tensors]]]) -> None:
    """Assert that residual before + gradient = applied + residual after, as means over ranks. See :func:`balance`."""
    for entries in zip(*books):
        for name in entries[0]["gradient"]:
            came = sum(entry["before"][name].double() + entry["gradient"][name].double() for entry in entries)
            owed = torch.as_tensor(came) / len(books)
            kept = torch.as_tensor(sum(entry["after"][name].double() for entry in entries)) / len(books)
            arrived = entries[0]["applied"][name].double() + kept
            rounding = 1e-6 * owed.abs().max().item() + 1e-12
            torch.testing.assert_close(arrived, owed, rtol=2e-6, atol=rounding, msg=partial("{}: {}".format, name))


class GivenGradients(nn.Module):
    """A model with the gradients that :meth:`forward` receives. Parameters without a given gradient are unused."""

    def __init__(self, gradients: Tensors) -> None:
        super().__init__()
        weights = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
        self.weights = nn.ParameterDict(weights)

    def forward(self, gradients: Tensors) -> Tensor:
        """Return a loss. The gradient of each parameter is the tensor of the same name in ``gradients``."""
        return torch.stack([(self.weights[name] * gradient).sum() for name, gradient in gradients.items()]).sum()


def train_both(rank: int, settings: dict[str, Any], micro_batches: int) -> None:
    """Train a model with the engine, and a copy with plain DDP. Assert equal parameters, up to rounding."""
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        torch.manual_seed(0)
        twin = DistributedDataParallel(Edges().to(DEVICE))
        for model in (ddp, twin):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for step in range(5):
                optimizer.zero_grad()
                for micro in range(micro_batches - 1):
                    with model.no_sync():
                        model(batch(rank, 100 * step + micro)).backward()
                model(batch(rank, 100 * step + 99)).backward()
                optimizer.step()
        engine.worker.raise_error()
        torch.testing.assert_close(parameters_of(ddp), parameters_of(twin), rtol=1e-5, atol=1e-6)


def is_exact(compressor: Compressor) -> bool:
    """Return whether a compressor can equal DDP: at density 1, or as a lossless compressor in the user's wire."""
    return (compressor.is_lossless and compressor.wire is None) or compressor.default_density is not None


@_invariant(
    [
        {"schedule": schedule, "micro_batches": batches, "ranks": ranks}
        for schedule, batches, ranks in (("merged", 1, 2), ("layerwise", 3, 2), ("single", 1, 3), ("merged", 3, 3))
    ],
    is_exact,
)
def density_1_equals_ddp(pool: Pool, compressor: Subject, schedule: str, micro_batches: int) -> None:
    """At density 1 a training equals DDP, with and without gradient accumulation."""
    density = None if density_for(compressor) is None else 1.0
    settings = settings_of(compressor, schedule=schedule) | {"density": density}
    pool.run(train_both, settings, micro_batches)


@_invariant(_WIRES)
def replicas_and_schedules_agree(pool: Pool, compressor: Subject, wire: str) -> None:
    """Replicas are bitwise identical after every step, and no schedule changes the parameters."""
    schedules: list[str | Schedule] = ["layerwise", "single", FixedSize(1000), FixedSize(2600)]
    subject = subject_of(compressor)
    if subject.selects_across_bucket:
        schedules *= 2  # selections depend on buckets, so a second run of each schedule is the reference
    settings = settings_of(compressor, wire=wire)
    outcomes = outcomes_of(pool, settings, schedules, one_model=not subject.replicas_diverge)
    for outcome, expected in zip(outcomes, outcomes[4:] or outcomes[:1] * len(outcomes)):
        assert_same(outcome, expected)


def outcomes_of(
    pool: Pool, settings: dict[str, Any], schedules: Sequence[str | Schedule], steps: int = 3, one_model: bool = True
) -> list[list[list[Tensors]]]:
    """Return parameters by schedule, rank and step. With ``one_model``, assert equal parameters on all ranks."""
    books = [pool.run(balance, {**settings, "schedule": each}, steps, 0.9) for each in schedules]
    outcomes = [[[entry["parameters"] for entry in book] for book in ranks] for ranks in books]
    for first, *others in outcomes if one_model else ():
        for history in others:
            assert_same(history, first)
    return outcomes


_PRIME = 997
_PLACES = (0, _PRIME // 2, _PRIME - 1, random.Random(0).randrange(_PRIME))
# All pairs of a non-finite value and one of four indices of the parameter ``prime`` of :class:`Edges`.
GAPS = list(product((float("nan"), float("inf"), float("-inf")), _PLACES))


def train_with_gaps(rank: int, settings: dict[str, Any], gap_rank: int) -> None:
    """For each of ``GAPS``, train a step with this value in a gradient of rank ``gap_rank``, and a normal step.

    Assert that the value reaches the optimizer, and changes neither the engine's state nor the next step.
    """
    torch.manual_seed(0)
    faults = []
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        for step in range(2):
            backpropagate(ddp, engine, ddp(batch(rank, step)))
        for step, (poison, place) in enumerate(GAPS, 1):
            before, gap = copy.deepcopy(engine.state_dict()), f"{poison} in element {place}"
            factor = poison if rank == gap_rank else 1.0
            backpropagate(ddp, engine, ddp(batch(rank, 2 * step)) + ddp.module.prime[place] * factor)
            faults += [f"{gap} changes {change}" for change in differences(before, engine.state_dict())]
            if ddp.module.prime.grad.isfinite().all():
                faults.append(f"{gap} is hidden")
            backpropagate(ddp, engine, ddp(batch(rank, 2 * step + 1)))
            if not all(bool(gradient.isfinite().all()) for gradient in gradients_of(ddp).values()):
                faults.append(f"{gap} affects the next step")
    assert not faults, faults


@_invariant(_WAYS)
def nonfinite_gradients_change_no_state(pool: Pool, compressor: Subject, **way: str) -> None:
    """A NaN or an infinity in one rank's gradient reaches the optimizers of all ranks, and changes no engine state."""
    pool.run(train_with_gaps, settings_of(compressor, **way), 1)


EDGE_GRADIENTS = {
    "one element": torch.tensor([2.0]),
    "all zero": torch.zeros(70),
    "all equal": torch.full((70,), 3.0),
    "all negative": -torch.arange(1.0, 71.0),
    "prime size": torch.linspace(-1, 1, 997),
    "fewer elements than ranks": torch.tensor([1.0, -2.0]),
    "beyond float16": torch.tensor([1e6, -3e38, 1.0, 1e-9]),
    "denormal": torch.full((70,), 1e-42),
    "large and equal": torch.full((200_000,), -0.5),
}


def edges_of(dtype: torch.dtype) -> Tensors:
    """Return ``EDGE_GRADIENTS`` in a dtype. Elements are clamped to the range of the dtype."""
    limit = torch.finfo(dtype).max
    return {edge: gradient.double().clamp(-limit, limit).to(dtype) for edge, gradient in EDGE_GRADIENTS.items()}


def exchange_given(rank: int, settings: dict[str, Any], models: list[Tensors]) -> dict[str, tuple[Tensor, Tensor]]:
    """Exchange the same gradients of several models on all ranks. Return exchanged gradients and residuals by name."""
    answers = dict[str, tuple[Tensor, Tensor]]()
    for gradients in moved(models, DEVICE):
        with sparse_ddp(GivenGradients(gradients), **settings) as (ddp, engine):
            backpropagate(ddp, engine, ddp(gradients))
            residuals = residuals_like(engine, dict(ddp.module.named_parameters()))
            for name, weight in ddp.module.weights.items():
                answers[name] = weight.grad.clone(), residuals[f"weights.{name}"]
    return answers


def assert_applied_and_kept(
    compressor: Subject, gradients: Tensors, ranks: list[dict[str, tuple[Tensor, Tensor]]]
) -> None:
    """Assert that ranks apply equal, finite gradients, and that applied gradient + mean residual = gradient."""
    for edge, gradient in gradients.items():
        answers = [answer[edge] for answer in ranks]
        for applied, _ in answers:
            assert torch.equal(applied, answers[0][0]), f"{edge}: ranks differ"
            assert applied.dtype == gradient.dtype, f"{edge}: dtype is {applied.dtype}"
            assert applied.isfinite().all(), f"{edge}: not finite, {applied}"
            assert not applied[gradient == 0].any(), f"{edge}: a zero has become non-zero, {applied}"
        if subject_of(compressor).feedback.keeps_residual:
            mass = answers[0][0].double() + sum(residual.double() for _, residual in answers) / len(answers)
            rtol = max(torch.finfo(gradient.dtype).eps, 1e-6)
            torch.testing.assert_close(
                mass, gradient.double(), rtol=rtol, atol=1e-8, msg=partial("{}: mass is not conserved. {}".format, edge)
            )


@_invariant([{"wire": wire, "dtype": dtype} for wire, dtype in product(WIRES, _DTYPES)] + _WIRES)
def edges_arrive(pool: Pool, compressor: Subject, wire: str, dtype: Optional[torch.dtype] = None) -> None:
    """Each of ``EDGE_GRADIENTS`` is applied or goes to the residual, alone in a model (no ``dtype``) or jointly."""
    gradients = edges_of(dtype or torch.float32)
    # A model for each gradient, because other gradients may change thresholds and partitions.
    models = [{edge: gradient} for edge, gradient in gradients.items()] if dtype is None else [gradients]
    # A bucket for each gradient, because `selects_across_bucket` sends only a bucket's largest elements.
    settings = settings_of(compressor, wire=wire, schedule="layerwise")
    assert_applied_and_kept(compressor, gradients, pool.run(exchange_given, settings, models))


@_invariant(_WIRES)
def zero_stays_zero(pool: Pool, compressor: Subject, wire: str) -> None:
    """An element that is zero on all ranks is zero after the exchange, and has no residual."""
    # Only 20 of 1000 elements are not zero, as in an embedding with few used rows. The density selects 50 elements.
    gradient = torch.cat([torch.linspace(-1, 1, 20), torch.zeros(980)])
    for answer in pool.run(exchange_given, settings_of(compressor, wire=wire), [{"rows": gradient}]):
        for tensor in answer["rows"]:  # first the applied gradient, then the residual
            assert not tensor[gradient == 0].any(), f"a zero has become non-zero, {tensor}"
