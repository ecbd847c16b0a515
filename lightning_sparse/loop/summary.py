"""Log lines and warnings of a training."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from torch.optim import Optimizer

from lightning_sparse.compressors.base import FROM_OPTIMIZER
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.engine.settings import LocalSteps, Settings
from lightning_sparse.engine.wire import EXCHANGES
from lightning_sparse.schedule import FixedSize

FEW_ROUNDS = 100
SHORTEST_PART = 5  # of the rounds asked for, that those may be which validations end
SAFE_STEPS = 5  # local ones, with which short trainings have been shown to end near DDP's loss

RESUMES_ALONE = (
    "one process goes on from what a compressed training has kept: it sends nothing, and still compresses, so that the"
    " model gets what had not been sent; each update is late by as much as before. To end that, resume with"
    " resume_compression=False."
)
TAKES_MOMENTUM = (
    "the momentum of the SGD optimizer is accumulated before compression from now on, until the end of training;"
    " meanwhile the optimizer steps without, and with its weight decay divided by 1 - momentum."
)
OWN_MODELS = (
    "training ended in an exception, and each rank holds its own model, not the mean of all: another fit begins with"
    " the model of rank 0."
)
UNSAVED_GRADIENTS = (
    "gradients accumulated since the last optimizer step (backward passes: {backwards}) are not in this checkpoint, as"
    " with ddp: save after a step to resume exactly"
)


# What a user is told whose clip acts on updates, not on the gradients that they are made of.
CHANGED = (
    "gradients were changed between backward and the optimizer's step, such as by torch.nn.utils.clip_grad_norm_. With"
    " Adam and AdamW they hold updates by then, which have been selected out of what has waited: what is clipped off"
    " them is lost, and training all but stops. Have the gradients clipped that updates are made of: by"
    " Trainer(gradient_clip_val=...) or self.clip_gradients(...); in a plain loop by handle.clip(norm=...); with Fabric"
    " by fabric.clip_gradients(...)."
)


UNCOUNTED_BATCHES = 8  # in a row, more than hooks change weights in while a step accumulates
UNCOUNTED = (
    f"{UNCOUNTED_BATCHES} batches in a row have changed the weights, and no optimizer that is known has made a step."
    " Steps are counted, to exchange after so many of them, and momentum and Adam's updates are made for the optimizers"
    " that are known: let the step() of an optimizer that configure_optimizers returns, or that"
    " sparsify_gradients was given,"
    " make the updates (a new one needs handle.close() and sparsify_gradients once more); or end each round"
    " yourself, in a plain"
    " loop by handle.synchronize()"
)


def describe(settings: Settings) -> str:
    """Say what is sent of each gradient, with which warm-up, schedule, exchange, wire and correction."""
    compressor, local = settings.compressor, settings.local_steps
    what = "gradient" if local is None else "change of parameters"
    if compressor.default_density is not None:
        sent = f"{settings.density:g} of each {what}"
    else:
        sent = f"each {what} whole" if compressor.wire_format == "reduce" else f"each {what} in a code of its own"
    parts = {"warm-up": _warm_up(settings), "schedule": _schedule(settings)}
    if local is not None:
        first = f", the first {local.synchronous_steps} steps are synchronous" if local.synchronous_steps else ""
        parts["local steps"] = f"{local.every}{first}"
    if compressor.wire_format == "gather":
        named = [word for word, exchange in EXCHANGES.items() if exchange == settings.exchange]
        parts["exchange"] = named[0] if named else repr(settings.exchange.owners)
    bits = settings.wire_bits
    parts["wire"] = str(settings.wire).removeprefix("torch.") if bits is None else f"{bits}bit"
    parts["correction"] = _correction(settings)
    return "; ".join(
        [f"{type(compressor).__name__} sends {sent}", *(f"{part}: {told}" for part, told in parts.items())]
    )


def adam_line(settings: Settings, optimizers: Sequence[Optimizer], total_steps: Optional[int] = None) -> str:
    """Describe the first steps of the corrected optimizers, in a training of so many steps."""
    assert settings.adam is not None
    names = " and ".join(sorted({type(each).__name__ for each in optimizers if is_correctable(each)}))
    dense, fall = settings.adam.warm_up(total_steps)
    falls = "" if fall == 0 else f", then the density falls from 1 to {settings.least_density:g}"
    return f"{names} sends whole gradients in the first {dense} optimizer steps{falls}."


def warning_for(optimizer: Optimizer) -> str:
    """Compose the warning for an adaptive optimizer, or for Muon, that is given sparse gradients."""
    name = type(optimizer).__name__
    if "ns_steps" in optimizer.defaults:
        return (
            f"{name} takes directions from what arrives, and what arrives is sparse. A small GPT, MuonAdamW, top-k with"
            " a 16th sent, 1000 steps: validation loss 1.258 where DDP ends at 1.212. Choose strategy='sparse_qsgd',"
            " which sends every element in 4 bits (1.215); local_steps=..., with MuLoCo's constants;"
            " torch.optim.AdamW, or strategy='ddp'."
        )
    return (
        f"{name} learns how large gradients are from what arrives, and what arrives is sparse: it sees one spike where"
        " dense training sees a hundred small gradients, and the model at the end is a worse one. A small GPT, AdamW,"
        " density 0.01, 1000 steps: validation loss 2.11 where DDP ends at 1.55 (beta2 0.95), 1.89 and 1.51 (0.999)."
        " Choose torch.optim.AdamW or Adam, whose updates are made before selection unless"
        " optimizer_correction=None; or torch.optim.SGD; or strategy='ddp'."
    )


def report(stats: Mapping[str, float], verdict: Optional[str] = None, dense: str = "DDP") -> str:
    """Say what a training has sent and waited for; ``verdict`` is what ``sparse_auto`` has found.

    Example::

        >>> sizes = {"total_wire_bytes": 35.9e6, "total_dense_bytes": 203e6, "total_compression_ratio": 5.65}
        >>> report({**sizes, "total_steps": 165.0, "exposed_share": 0.118})
        '165 steps sent 35.9 MB where DDP sends 203 MB, compression ratio 5.65; exposed: 11.8 % of the time.'
    """
    inside = (
        f" ({in_bytes(stats['total_inter_node_bytes'])} to other nodes)" if "total_inter_node_bytes" in stats else ""
    )
    parts = [
        f"{stats['total_steps']:.0f} steps sent {in_bytes(stats['total_wire_bytes'])}{inside} where {dense} sends"
        f" {in_bytes(stats['total_dense_bytes'])}, compression ratio {stats['total_compression_ratio']:.3g}"
    ]
    if not math.isnan(stats["exposed_share"]):
        parts.append(f"exposed: {100 * stats['exposed_share']:.1f} % of the time")
    return "; ".join([*parts, *filter(None, [verdict])]) + "."


def log_rounds(
    local: LocalSteps, steps: int, log: Callable[[str], None], warn: Optional[Callable[[str], None]]
) -> None:
    """Log how many rounds so many optimizer steps make, and ``warn`` of few."""
    every = local.every
    count = -(-max(0, steps - local.synchronous_steps) // every)
    rounds = f"{count} round{'s' * (count != 1)} of {every} local steps"
    log(f"up to {steps} optimizer steps, that is {rounds}.")
    if warn is not None and count < FEW_ROUNDS and every > SAFE_STEPS:
        warn(
            f"local_steps={every} makes {rounds}, and so few do not get to DDP's loss: after 800 steps a small GPT"
            " ended 8 to 48 % above it with 27 to 40 rounds of 20 or 30 steps, and 4 % with 160 rounds of 5. In short"
            f" trainings take local_steps={SAFE_STEPS}, or 'lags' without local steps, which exchanges in every step."
        )


def warning_of_validations(local: LocalSteps, steps: int) -> str:
    """Compose the warning for validations that come many times a round, each after so many steps; else return none."""
    if not 0 < steps * SHORTEST_PART < (every := local.every):
        return ""
    return (
        f"a validation ends a round, and validations come every {steps} optimizer steps: rounds are no longer than"
        f" that, not local_steps={every}. Validate less often (val_check_interval=..., check_val_every_n_epoch=...), or"
        " give fewer local steps."
    )


def in_bytes(count: float) -> str:
    """Write a number of bytes, such as 1.23 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g} B"


def _warm_up(settings: Settings) -> str:
    words = []
    if settings.warmup_epochs:
        first = settings.density ** (1 / (settings.warmup_epochs + 1))
        most = "at most " if settings.bounds_warm_up else ""
        words.append(f"over {most}{settings.warmup_epochs} epochs, from {first:.2g} to {settings.density:g}")
    if settings.adam is not None:
        words.append("whole gradients in Adam's first steps")
    return ", or where it sends more, ".join(words) or "none"


def _schedule(settings: Settings) -> str:
    schedule = settings.schedule
    name = type(schedule).__name__
    return f"{name}({schedule.min_elements})" if isinstance(schedule, FixedSize) else name.lower()


def _correction(settings: Settings) -> str:
    feedback = settings.feedback
    if settings.adam is not None:
        return "the largest part of Adam's updates is sent"
    if feedback.momentum is not None:
        whose = "the optimizer's" if feedback.momentum == FROM_OPTIMIZER else f"a {feedback.momentum}"
        return f"{whose} momentum is applied before the largest elements are chosen"
    return "none"
