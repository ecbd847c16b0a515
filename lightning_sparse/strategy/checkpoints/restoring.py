"""Select what fits the present model and compressor from a saved state."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine import Engine
from lightning_sparse.engine.memory.residual import NUMBERS, RATES, WHOLE, waiting_kinds, widened
from lightning_sparse.engine.step.levels import Topology
from lightning_sparse.jobs.newest import CheckpointError
from lightning_sparse.loop.loop import Loop
from lightning_sparse.strategy.checkpoints.shards import CURE, Save


def restore(
    loop: Loop, kept: Mapping[str, Any], save: Save, parameters: Mapping[str, Tensor], source: str
) -> list[str]:
    """Give a loop what it can use of what this or another one had kept; return in words what it cannot."""
    engine, state, layouts = loop.engine, kept["engine"], kept.get("layouts", {})
    assert engine is not None
    compressor = engine.compressor
    usable: dict[str, Any] = {}
    unused: list[str] = []
    present = engine.state_dict()
    kinds = waiting_kinds(state["memory"])
    if reason := _other_memory(compressor, kinds, state, present):
        unused.append(reason)
    elif kinds:
        usable["memory"], gone = _fitted_memory(state["memory"], engine, save, parameters, layouts, source)
        if not compressor.feedback.follows_learning_rate:
            usable["memory"].pop(RATES, None)
        unused += [f"what was kept of {', '.join(gone)}, which the model does not have"] * bool(gone)
    if type(compressor).__name__ == save.compressor:
        usable["compressor"] = state["compressor"]
    elif state["compressor"]:
        unused.append(f"what {save.compressor} had learned, because {type(compressor).__name__} goes on")
    usable |= {part: state[part] for part in ("averager", "plan", "warm_up") if part in state}
    if "rounds" in state and "rounds" in present:
        usable["rounds"] = {**state["rounds"], "momentum": _fitted_momenta(state["rounds"], engine, save, parameters)}
    try:
        if not loop.load({**kept, "engine": usable}, save.topology):
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
    if kinds and kinds != waiting_kinds(present["memory"]):
        return f"{' and '.join(sorted(kinds))}, because {type(compressor).__name__} keeps other things"
    return ""


def remarks(save: Save, topology: Topology, unused: Sequence[str], source: str) -> Iterator[str]:
    """Yield what the user should know of a state that was taken up by ranks of a :attr:`Save.topology`."""
    if save.topology != topology:
        group = "in replicas" if save.is_sharded else "on nodes"
        before, now = ("" if each == 1 else f" {group} of {each}" for each in (save.node_ranks, topology[1]))
        yield (
            f"{save.ranks} ranks{before} saved {source}, {topology[0]}{now} go on. Each begins with the mean of what"
            " those had not sent yet, so that nothing is lost; what each rank held a part of is cut into parts anew."
        )
    if unused:
        yield f"not used of {source}: {'; '.join(unused)}."


def _fitted_memory(
    kept: Mapping[str, Mapping[str, Tensor]],
    engine: Engine,
    save: Save,
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
        numel = parameter.numel() if kind in WHOLE else _kept_numel(parameter.numel(), engine, save)
        if tensor.numel() != NUMBERS.get(kind, numel):
            raise CheckpointError(
                f"{source} keeps a {kind} of {tensor.numel()} elements for the parameter {name!r}, which has"
                f" {parameter.numel()}: its shape has changed since. {CURE}"
            )
        if kind not in NUMBERS:
            try:
                if kind in WHOLE:
                    tensor = _relaid(tensor, layouts[name], parameter)
                else:
                    tensor = _fitted_tensor(tensor, engine, save, parameter, layouts.get(name))
            except ValueError as error:
                raise CheckpointError(
                    f"{source} keeps a {kind} that does not fit the parameter {name!r}: {error}. {CURE}"
                ) from error
        fitted[kind][name] = tensor.to(parameter.device, widened(parameter.dtype))
    return fitted, sorted(gone)


def _fitted_momenta(
    rounds: Mapping[str, Any], engine: Engine, save: Save, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return outer momenta, or this rank's part of each where the ranks of an island divide it anew."""
    momenta: dict[str, Tensor] = rounds["momentum"]
    if _are_shares(engine, save):
        return momenta
    return {
        name: engine.levels.part_of(each[: parameters[name].numel()])
        for name, each in momenta.items()
        if name in parameters
    }


def _kept_numel(numel: int, engine: Engine, save: Save) -> int:
    """Return how many elements were read of what is kept of a parameter of so many."""
    share = -(-numel // save.node_ranks)
    return share if _are_shares(engine, save) else share * save.node_ranks


def _are_shares(engine: Engine, save: Save) -> bool:
    return save.node_ranks > 1 and save.topology == engine.topology


def _fitted_tensor(tensor: Tensor, engine: Engine, save: Save, parameter: Tensor, layout: Any) -> Tensor:
    """Return what this rank keeps of a parameter as it lies now."""
    if not _are_shares(engine, save):
        whole = tensor[: parameter.numel()]
        return engine.levels.share_of(whole if layout is None else _relaid(whole, layout, parameter))
    if layout is not None and layout != (now := saved_layouts({"": parameter})[""]):
        raise ValueError(
            f"it was saved with the shape and the order {layout}, and has {now} now. Of the ranks of a node each keeps"
            " a share of it: resume with the same memory_format, or with SparseDDPStrategy(levels=1)"
        )
    return tensor


def saved_layouts(parameters: Mapping[str, Tensor]) -> dict[str, list[list[int]]]:
    """Return, by name, shape and strides of what is kept of each parameter, which lies as its gradient does."""
    return {name: [list(parameter.shape), _strides(parameter)] for name, parameter in parameters.items()}


def _strides(parameter: Tensor) -> list[int]:
    """Return those of the gradient in DDP: the parameter's where that fills its memory, else row by row."""
    fills = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    strides = parameter.stride() if fills else torch.empty(parameter.shape, device="meta").stride()
    return [stride if size > 1 else 1 for size, stride in zip(parameter.shape, strides)]


def _relaid(flat: Tensor, layout: Any, parameter: Tensor) -> Tensor:
    """Return what was kept of a parameter in the order in which it lies in memory now."""
    shape, strides = layout if isinstance(layout, list) and len(layout) == 2 else (layout, [])
    if shape != list(parameter.shape):
        raise ValueError(f"it was saved with the shape {shape}, and has {list(parameter.shape)} now")
    try:
        before = flat.as_strided(shape, strides)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{layout!r} is no layout") from error
    now = torch.empty_strided(shape, _strides(parameter), dtype=flat.dtype, device=flat.device)
    now.copy_(before)
    return now.as_strided((flat.numel(),), (1,))


def fitted_gradients(
    gradients: Mapping[str, Tensor], parameters: Mapping[str, Parameter], source: str
) -> dict[Parameter, Tensor]:
    """Return what had been accumulated when the save came between two batches of one step."""
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
