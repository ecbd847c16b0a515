"""Names and arguments that this version has renamed or removed. For one release, errors name the replacement."""

from functools import wraps
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type[Any])
# Keys: a strategy's name, a command, an attribute, an argument of an entry point, or "Class.argument".
REMOVED: dict[str, str] = {
    "RequeueAtStepEnd": "the strategy requeues by itself: leave the callback out",
    "plan": "use lightning-sparse estimate instead",
    "warmup_epochs": "use warmup_steps instead, a number of optimizer steps or a fraction of the training",
    "GradientSparsifier.set_epoch": "leave it out, because warm-ups count optimizer steps",
    "submit": "change a script in examples/slurm instead (docs/slurm-and-kubernetes.md lists the lines)",
    "AssumptionMonitor": "examples/check_assumption.py measures delta of every layer",
    "SparseFabricModelParallelStrategy": "use Trainer(strategy='sparse_hsdp') for models that do not fit",
    "GradientSparsifier.clip": "use torch.nn.utils.clip_grad_norm_ or clip_grad_value_ instead",
    "GradientSparsifier.state_dict": "use save_state(folder) instead, on all ranks",
    "GradientSparsifier.load_state_dict": "use load_state(folder) instead, on all ranks",
    "CriticalRegime": "use ErrorBudget, or a DensityRule of your own",
    "Owners": "use exchange='owners' instead",
    "Warmup": "use warmup_steps of the strategy instead",
    "LocalSteps.synchronous_steps": "train the first steps with strategy='ddp', and resume from the checkpoint",
    "LocalSteps.overlap_steps": "leave it out, because rounds wait for the exchange",
    "local_steps='auto'": "give a number of steps, `lightning-sparse estimate` prints one",
    "sparse_muloco": "use SparseDDPStrategy('dense', wire='bfloat16', local_steps=LocalSteps(30, outer_lr=0.7,"
    " outer_momentum=0.6, nesterov=True))",
    "levels=2 with local_steps": "leave levels out, or use sparse_hsdp, where ranks of a node average every gradient",
    "OverlapTimeline.pictures": "open the trace at https://ui.perfetto.dev",
    "sparsify": "use sparsify_gradients instead",
    "Sparsifier": "use GradientSparsifier instead",
    "GradientSparsifier.accumulating": "use no_sync instead",
    "GradientSparsifier.stats": "use compression_stats instead",
    "GradientSparsifier.adopt": "use reset_shared_model instead",
    "AdamCorrection.dense_steps": "use warmup_steps instead",
    "AdamCorrection.fall_steps": "use density_decay_steps instead",
    "AdamCorrection.refresh_steps": "use second_moment_interval instead",
    "Rule": "use DensityRule instead",
    "Compressor.selects_across_group": "use selects_across_bucket instead",
    "Compressor.density_of": "set the attribute densities instead, a dictionary",
    "Compressor.least_density": "leave it out, because the attribute densities has the smallest density",
    "Compressor.adapts_density": "use adaptive_density instead",
    "LAGS.adapts_density": "use adaptive_density instead",
}


def refuse_removed(what: str, name: str, kind: type[BaseException] = ValueError) -> None:
    """Raise ``kind`` if this version has renamed or removed ``name``. The message has the new name or alternative."""
    if name in REMOVED:
        raise kind(f"{what}, which this package no longer has: {REMOVED[name]}")


def refusing(kind: Kind) -> Kind:
    """Decorate a class: a renamed or removed argument raises ``ValueError`` with the replacement."""
    build = kind.__init__

    @wraps(build)
    def checked(self: Any, *given: Any, **named: Any) -> None:
        for name, value in named.items():
            refuse_removed(f"{name}={value!r}", f"{kind.__name__}.{name}")
        build(self, *given, **named)

    kind.__init__ = checked
    return kind
