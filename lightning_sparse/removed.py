"""Names and arguments that this package no longer has, each with its alternative; one release reads them."""

from functools import wraps
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type[Any])
# A strategy's name, a command, an attribute, an argument of an entry point, or "Class.argument" of a class.
REMOVED: dict[str, str] = {
    "RequeueAtStepEnd": "the strategy requeues by itself: leave the callback out",
    "plan": "use lightning-sparse estimate instead",
    "submit": "change a script in examples/slurm instead (docs/clusters.md lists the lines)",
    "AssumptionMonitor": "examples/check_assumption.py measures delta of every layer",
    "SparseFabricModelParallelStrategy": "use Trainer(strategy='sparse_hsdp') for models that do not fit",
    "Sparsifier.state_dict": "use save_state(folder) instead, on all ranks",
    "Sparsifier.load_state_dict": "use load_state(folder) instead, on all ranks",
    "CriticalRegime": "use ErrorBudget or Warmup, or a Rule of your own",
    "LocalSteps.overlap_steps": "a round waits for its exchange, leave it out",
    "local_steps='auto'": "give a number of steps, `lightning-sparse estimate` prints one",
    "sparse_muloco": "use SparseDDPStrategy('dense', wire='bfloat16', local_steps=LocalSteps(30, outer_lr=0.7,"
    " outer_momentum=0.6, nesterov=True))",
    "levels=2 with local_steps": "leave levels out, or use sparse_hsdp, which with local_steps trains a node in step",
}


def refuse_removed(what: str, name: str, kind: type[BaseException] = ValueError) -> None:
    """Raise an error with the alternative, if the name is one of them."""
    if name in REMOVED:
        raise kind(f"{what}, which this package no longer has: {REMOVED[name]}")


def refusing(kind: Kind) -> Kind:
    """Let a class refuse its arguments that are gone, instead of Python, which has no alternative to tell."""
    build = kind.__init__

    @wraps(build)
    def checked(self: Any, *given: Any, **named: Any) -> None:
        for name, value in named.items():
            refuse_removed(f"{name}={value!r}", f"{kind.__name__}.{name}")
        build(self, *given, **named)

    kind.__init__ = checked
    return kind
