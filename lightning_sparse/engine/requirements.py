"""Capabilities that each feature requires of the settings, and the error for a missing capability."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import ErrorFeedback
from lightning_sparse.engine.wire import wire_values
from lightning_sparse.schedule import Auto, Merged


class Capability(NamedTuple):
    """A property of settings that a feature may need."""

    is_given: Callable[[Any], bool]  # takes settings, and returns whether the settings have the capability
    problem: str  # clause of an error message, with ``{}`` for the compressor's name


class Feature(NamedTuple):
    """The requirements of a feature, such as an argument, a callback or an environment (Fabric)."""

    needs: tuple[str, ...]  # required capabilities, as keys of CAPABILITIES
    instead: str  # advice at the end of an error message, in the imperative
    is_asked: Callable[[Any], Any] = lambda it: False  # returns whether the arguments in settings use the feature


def takes_wire(compressor: Compressor, wire: str) -> bool:
    """Return whether a compressor works with ``wire``. 4 or 2 bits require a fixed number of sent elements."""
    is_sized = compressor.wire_format == "reduce" or (compressor.wire_format == "gather" and compressor.fills_selection)
    return is_sized or wire_values(wire).bits is None


def _works_on_shares(settings: Any) -> bool:
    own = settings.compressor
    return type(own).finish_step is Compressor.finish_step and own.wire_format in ("gather", "reduce")


CAPABILITIES = {
    "density": Capability(lambda it: it.compressor.default_density is not None, "{} has no density"),
    "density by parameter": Capability(
        lambda it: it.compressor.has_density_by_parameter, "{} has no separate density for each parameter"
    ),
    "one model": Capability(lambda it: not it.compressor.replicas_diverge, "{} lets replicas drift apart"),
    "residual": Capability(lambda it: it.compressor.feedback.keeps_residual, "{} has no residual"),
    "part": Capability(lambda it: not it.compressor.is_lossless, "{} sends all elements"),
    "rest": Capability(
        lambda it: not (it.compressor.is_lossless and it.wire is torch.float32), "{} sends all elements exactly"
    ),
    "gradient": Capability(
        lambda it: it.compressor.feedback.momentum is None and it.compressor.feedback.clip_norm is None,
        "{} accumulates momentum or clips, by its arguments momentum=... and clip_norm=...",
    ),
    "mask": Capability(
        lambda it: not it.compressor.selects_across_bucket, "{} selects across a bucket, not by parameter"
    ),
    "residual alone": Capability(
        lambda it: it.compressor.feedback == ErrorFeedback(), "{} does not use plain error feedback"
    ),
    "dense buckets": Capability(
        lambda it: it.compressor.dense_wire_format is not None, "{} cannot send dense gradients"
    ),
    "shares": Capability(_works_on_shares, "{} needs complete gradients, not parts of gradients"),
    "size": Capability(lambda it: takes_wire(it.compressor, "4bit"), "{} sends a varying number of elements"),
    "gather": Capability(lambda it: it.compressor.wire_format == "gather", "{} does not send selections by all-gather"),
    "plan": Capability(lambda it: isinstance(it.schedule, Merged), "this schedule has no bucket plan"),
    "exchange": Capability(lambda it: not isinstance(it.schedule, Auto), "schedule='auto' may change to plain DDP"),
    "bound": Capability(
        lambda it: not it.compressor.adaptive_density,
        "adaptive_density sends more than the density if backward hides the time",
    ),
    "replicas": Capability(
        lambda it: not it.replicas_diverge, "replicas drift apart between two averages, as with a2sgd and local_steps"
    ),
    "step": Capability(
        lambda it: it.local_steps is None, "with local_steps, ranks exchange parameter changes, not gradients"
    ),
}
_SPARSIFIER = "remove it, or choose a sparsifier such as compressor='topk'"
_BY_ELEMENT = "choose a compressor that works on single elements: topk, lags, omgs, dgc, qsgd or dense"
FEATURES = {
    "density=...": Feature(("density",), _SPARSIFIER),
    "warmup_steps=...": Feature(("density",), _SPARSIFIER, lambda it: it.warmup_steps),
    "wire='4bit'": Feature(("size",), "use wire='bfloat16', or compressor='topk'", lambda it: it.wire_bits is not None),
    "exchange=...": Feature(("gather",), _SPARSIFIER, lambda it: it.exchange != "auto"),
    "levels=2": Feature(("one model", "shares"), f"remove it, or {_BY_ELEMENT}", lambda it: it.levels == 2),
    "optimizer_correction=AdamCorrection(...)": Feature(
        ("one model", "residual", "part", "step"),
        f"{_SPARSIFIER}, with local_steps=1",
        lambda it: it.optimizer_correction not in (None, "auto"),
    ),
    "adaptive_density=True": Feature(
        ("plan",), "use schedule='merged', or adaptive_density=False", lambda it: it.compressor.adaptive_density
    ),
    "schedule='auto'": Feature(
        ("residual alone", "one model", "dense buckets"),
        "use schedule='merged', or topk, lags or omgs without momentum",
        lambda it: isinstance(it.schedule, Auto),
    ),
    "local_steps=...": Feature(
        ("one model", "gradient", "bound", "exchange"),
        "use topk or dense, or give the compressor momentum=None and clip_norm=None, with schedule='merged'"
        " and adaptive_density=False",
        lambda it: it.local_steps is not None,
    ),
    "residual_decay=...": Feature(
        ("residual", "rest"),
        f"{_SPARSIFIER}, or a wire that rounds, such as wire='4bit'",
        lambda it: it.asked.decay != 1,
    ),
    "MomentumCorrection": Feature(
        ("gradient", "residual", "step", "exchange"), "remove it, or use sparse_topk or sparse_lags"
    ),
    "masks_momentum=True": Feature(
        ("mask",),
        "use masks_momentum=False, or compressor='lags'",
        lambda it: it.asked.momentum is not None and it.asked.masks_momentum,
    ),
    "AdaptiveDensity": Feature(
        ("density by parameter", "exchange", "step"),
        "remove it, or use topk, lags or dgc with schedule='merged' and local_steps=1",
    ),
    "OverlapTimeline": Feature(("step",), "remove it: CompressionMonitor logs exposed_seconds"),
    "ModelPruning": Feature(("replicas",), "remove it, or use sparse_lags"),
    "StochasticWeightAveraging": Feature(("replicas",), "remove it, or use sparse_lags"),
    "ReplicaSentinel": Feature(("replicas",), "remove it: the statistics of A2SGD have replica_divergence"),
    "in a plain loop or Fabric": Feature(("one model",), "use the Trainer, or another compressor, such as topk"),
    "in a sharded model": Feature(("one model", "shares"), _BY_ELEMENT),
}


def refuse(reasons: Iterable[str]) -> None:
    """Raise ``ValueError`` with the first message of ``reasons``. Without messages, do nothing."""
    for reason in reasons:
        raise ValueError(reason)


def missing_capabilities(feature: str, settings: Any, given: str = "") -> Iterator[str]:
    """Yield one error message for each capability that a feature needs and the settings lack.

    Args:
        feature: a key of ``FEATURES``.
        settings: the checked settings.
        given: text of the user's argument, for the message.
    """
    for capability in map(CAPABILITIES.__getitem__, FEATURES[feature].needs):
        if not capability.is_given(settings):
            name = type(settings.compressor).__name__
            asked = given or (f"compressor={name} {feature}" if feature.startswith("in ") else feature)
            problem, instead = capability.problem.format(name), FEATURES[feature].instead
            yield f"{asked} is not supported: {problem}. To fix this, {instead}."


def unmet(settings: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each missing capability of the settings. Messages show the user's values ``given``."""
    for feature, (_, _, is_asked) in FEATURES.items():
        name = feature.partition("=")[0]
        if is_asked(settings):
            yield from missing_capabilities(feature, settings, f"{name}={given[name]!r}" if name in given else "")
