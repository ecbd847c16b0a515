"""Select what fits the present model and compressor from a saved state."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine import Engine
from lightning_sparse.engine.memory import widened
from lightning_sparse.strategy.checkpoints.layouts import relaid
from lightning_sparse.strategy.checkpoints.shards import CURE, CheckpointError, Save

_RATES = "learning_rate"
# Kinds that are a few numbers for each parameter, and how many.
_NUMBERS = {_RATES: 1, "second_moment_step": 1, "squared_norms": 2}


def restore_engine(
    engine: Engine,
    compressor: Compressor,
    state: Mapping[str, Any],
    save: Save,
    parameters: Mapping[str, Tensor],
    layouts: Mapping[str, Any],
    source: str,
) -> list[str]:
    """Give an engine what it can use of a state that this engine or another one had.

    Args:
        engine: that goes on.
        compressor: of the engine.
        state: of an engine, as saved.
        save: where the state comes from.
        parameters: of the model, by name, also those that are frozen now.
        layouts: of the parameters when the state was saved, as :func:`saved_layouts` returned them; empty where an
            earlier version saved it.
        source: of the state, for messages.

    Returns:
        in words, what it cannot use.

    Raises:
        CheckpointError: if the shape of a parameter has changed, or the compressor refuses its state.
    """
    usable: dict[str, Any] = {}
    unused: list[str] = []
    present = engine.state_dict()
    kinds = state["memory"].keys() - _NUMBERS.keys()
    if reason := _other_memory(compressor, kinds, state, present):
        unused.append(reason)
    elif kinds:
        usable["memory"], gone = _fitted_memory(state["memory"], parameters, layouts, source)
        if not compressor.feedback.follows_learning_rate:
            usable["memory"].pop(_RATES, None)
        unused += [f"what was kept of {', '.join(gone)}, which the model does not have"] * bool(gone)
    if type(compressor).__name__ == save.compressor:
        usable["compressor"] = state["compressor"]
    elif state["compressor"]:
        unused.append(f"what {save.compressor} had learned, because {type(compressor).__name__} goes on")
    if "rounds" in state and "rounds" in present:
        usable["rounds"] = state["rounds"]
    if "averager" in state:
        usable["averager"] = state["averager"]
    try:
        engine.load_state_dict(usable)
        if "plan" in state and not engine.restore_plan(state["plan"], save.ranks):
            unused.append("its plan, which is for another number of ranks, another schedule or other parameters")
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{source}: {save.compressor} refuses its state in this model: {error!r}. {CURE}"
        ) from error
    return unused


def _other_memory(
    compressor: Compressor, kinds: AbstractSet[str], state: Mapping[str, Any], present: Mapping[str, Any]
) -> str:
    """Say why what was kept is of no use to the engine that goes on; nothing where it is, or nothing was kept."""
    if "rounds" in state and "rounds" not in present:
        return "what has changed since its last round, and waits, because gradients are exchanged now"
    if kinds and "rounds" in present and "rounds" not in state:
        return f"{' and '.join(sorted(kinds))}, because rounds of local steps keep changes of parameters"
    if kinds and kinds != present["memory"].keys() - _NUMBERS.keys():
        return f"{' and '.join(sorted(kinds))}, because {type(compressor).__name__} keeps other things"
    return ""


def remarks(save: Save, ranks: int, unused: Sequence[str], source: str) -> Iterator[str]:
    """Yield what the user should know of a state that was taken up."""
    if save.ranks != ranks:
        yield (
            f"{save.ranks} ranks saved {source}, {ranks} go on. Each takes up the mean of what those kept, so that the"
            " model is owed as much as before; what was divided between ranks is divided anew."
        )
    if unused:
        yield f"not used of {source}: {'; '.join(unused)}."


def _fitted_memory(
    kept: Mapping[str, Mapping[str, Tensor]],
    parameters: Mapping[str, Tensor],
    layouts: Mapping[str, Any],
    source: str,
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return what is kept as the parameters lie now, in type, device and order, and the names that the model lacks."""
    fitted: dict[str, dict[str, Tensor]] = {kind: {} for kind in kept}
    gone: set[str] = set()
    for kind, name, tensor in ((kind, *item) for kind, tensors in kept.items() for item in tensors.items()):
        if name not in parameters:
            gone.add(name)
            continue
        parameter = parameters[name]
        if tensor.numel() != _NUMBERS.get(kind, parameter.numel()):
            raise CheckpointError(
                f"{source} keeps a {kind} of {tensor.numel()} elements for the parameter {name!r}, which has"
                f" {parameter.numel()}: its shape has changed since. {CURE}"
            )
        if kind not in _NUMBERS and name in layouts:
            try:
                tensor = relaid(tensor, layouts[name], parameter)
            except ValueError as error:
                raise CheckpointError(
                    f"{source} keeps a {kind} that does not fit the parameter {name!r}: {error}. {CURE}"
                ) from error
        fitted[kind][name] = tensor.to(parameter.device, widened(parameter.dtype))
    return fitted, sorted(gone)


def fitted_gradients(
    gradients: Mapping[str, Tensor], parameters: Mapping[str, Parameter], source: str
) -> dict[Parameter, Tensor]:
    """Return what had been accumulated when the save came between two batches of one step.

    Raises:
        CheckpointError: if the shape of a parameter has changed.
    """
    fitted = {}
    for name in gradients.keys() & parameters.keys():
        parameter, gradient = parameters[name], gradients[name]
        if gradient.shape != parameter.shape:
            raise CheckpointError(
                f"{source} keeps a gradient of shape {tuple(gradient.shape)} for the parameter {name!r}, which has"
                f" shape {tuple(parameter.shape)} now. {CURE}"
            )
        fitted[parameter] = gradient.to(parameter.device, parameter.dtype)
    return fitted
