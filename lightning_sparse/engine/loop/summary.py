"""The line at the start of a fit that says what is sent."""

from lightning_sparse.compressors.feedback import FROM_OPTIMIZER
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.wire import EXCHANGES
from lightning_sparse.schedule import FixedSize


def summary(settings: Settings) -> str:
    """Say what is sent of each gradient, with which warm-up, schedule, exchange, wire and correction.

    Example::

        >>> summary(Settings("lags", 0.01, "single", "float32")).split("; ")[:3]
        ['LAGS sends 0.01 of each gradient', 'warm-up: none', 'schedule: single']
    """
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


def _warm_up(settings: Settings) -> str:
    words = []
    if settings.warmup_epochs:
        first = settings.density ** (1 / (settings.warmup_epochs + 1))
        words.append(f"over {settings.warmup_epochs} epochs, from {first:.2g} to {settings.density:g}")
    if settings.feedback.adam is not None:
        words.append("that of the correction")
    return ", or where it sends more, ".join(words) or "none"


def _schedule(settings: Settings) -> str:
    schedule = settings.schedule
    name = type(schedule).__name__
    return f"{name}({schedule.min_elements})" if isinstance(schedule, FixedSize) else name.lower()


def _correction(settings: Settings) -> str:
    feedback = settings.feedback
    if feedback.adam is not None:
        return "updates before selection"
    if feedback.momentum is not None:
        whose = "the optimizer's" if feedback.momentum == FROM_OPTIMIZER else f"{feedback.momentum}"
        return f"momentum before selection ({whose})"
    return "none"
