"""What a rank keeps between two steps, in one form for every entry point: whose each tensor is, its scope tells.

Those of ``RANK`` are the rank's own, and of ``SHARE`` the ranks of a node have a part each, which one after the other
make a whole: on another number of ranks their means over ranks, or nodes, go on behind the Trainer and Fabric; a plain
loop refuses. What is kept ``EVERYWHERE`` is the same on all ranks, or passed on as it is.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.engine import Engine
from lightning_sparse.engine.memory.residual import NUMBERS, RATES, waiting_kinds, widened
from lightning_sparse.engine.step.levels import HierarchicalRanks
from lightning_sparse.functional.elements import as_dtensor, laid_flat, local_tensor, local_tensors

VERSION = 7  # of this form, and of checkpoints
SCOPES = RANK, SHARE, EVERYWHERE = "rank", "node share", "everywhere"
_GROUPS = "groups"  # in the state of an optimizer beside the numbers of its parameters
_OF_THE_MODEL = {"params", "param_names", "initial_lr"}  # in a group, by torch
# What a state has to have in common with where it is loaded.
_ALIKE = {
    "version": "go on with the release of lightning-sparse that saved it, on as many processes, or leave it out to"
    " start with nothing kept",
    "topology": "start as many processes on as many nodes as had saved it, with the same levels, or leave it out to"
    " start with nothing kept",
    "number": "each rank saves a state of its own, and is given that one again",
    "compressor": "choose that compressor, or leave the state out to start with nothing kept",
}


def kept_by(engine: Engine, together: bool = False) -> dict[str, Any]:
    """Return what is kept, as plain tensors and numbers, not copied; all ranks call if ``together``."""
    state = engine.state_dict(together)
    own = {part: state[part] for part in ("averager", "rounds") if part in state}
    everywhere = {part: each for part, each in state.items() if part not in (*own, "memory")}
    scopes: dict[str, Any] = {RANK: own, SHARE: {}, EVERYWHERE: everywhere}
    if "rounds" in own:
        everywhere["momentum"] = own["rounds"].pop("momentum")
    shared = SHARE if isinstance(engine.levels, HierarchicalRanks) else RANK
    for each in scopes.values():
        each["memory"] = {}
    for kind, tensors in state["memory"].items():
        scopes[RANK if kind in NUMBERS else shared]["memory"][kind] = tensors
    return {**origin_of(engine), "layouts": _layouts_of(engine.module), **scopes}


def origin_of(engine: Engine) -> dict[str, Any]:
    """Return whose it is, as plain values."""
    compressor = type(engine.pipeline.compressor).__name__
    return {"version": VERSION, "compressor": compressor, "topology": list(engine.topology)}


def check_alike(state: Mapping[str, Any], engine: Engine, number: int) -> None:
    """Refuse a plain loop's state of a rank that is not that of this ``number`` here, or with what is of no use."""
    present = {**origin_of(engine), "number": number}
    for kind, cure in _ALIKE.items():
        if (before := state.get(kind)) != (now := present.get(kind)):
            raise ValueError(f"this state is of {kind} {before!r}, and here it is {now!r}: {cure}")
    cure = "build the same model and optimizers, with the same arguments, or leave it out to start with nothing kept"
    try:
        unused = fitted(state, engine)[1]
    except ValueError as error:
        raise ValueError(f"{error}. Here {cure}") from error
    if unused:
        raise ValueError(f"this state holds what is of no use here, {'; '.join(unused)}: {cure}")


def fitted(kept: Mapping[str, Any], engine: Engine) -> tuple[dict[str, Any], list[str]]:
    """Return the state that an engine can use of what was kept, and say in words what it cannot.

    Raises:
        ValueError: if what was kept of a parameter does not fit it.
    """
    own, everywhere, name = kept[RANK], kept[EVERYWHERE], type(engine.pipeline.compressor).__name__
    usable: dict[str, Any] = {part: own[part] for part in ("averager",) if part in own}
    usable |= {part: everywhere[part] for part in ("warm_up", "order") if part in everywhere}
    unused: list[str] = []
    kinds = waiting_kinds(kind for scope in SCOPES for kind in kept[scope]["memory"])
    present = waiting_kinds(engine.memory.state_dict())
    if "rounds" in own and engine.rounds is None:
        unused.append("what has changed since its last round, and waits, because gradients are exchanged now")
    elif kinds and engine.rounds is not None and "rounds" not in own:
        unused.append(f"{' and '.join(sorted(kinds))}, because rounds of local steps keep changes of parameters")
    elif kinds and kinds != present:
        unused.append(f"{' and '.join(sorted(kinds))}, because {name} keeps other things")
    elif kinds:
        usable["memory"], gone = _fitted_memory(kept, engine)
        unused += [f"what was kept of {', '.join(gone)}, which the model does not have"] * bool(gone)
    if name == kept["compressor"]:
        usable["compressor"] = everywhere["compressor"]
    elif everywhere["compressor"]:
        unused.append(f"what {kept['compressor']} had learned, because {name} goes on")
    if "rounds" in own and engine.rounds is not None:
        parameters = dict(engine.module.named_parameters())
        momentum = {name: each for name, each in everywhere["momentum"].items() if name in parameters}
        usable["rounds"] = {**own["rounds"], "momentum": momentum}
    return usable, unused


def _fitted_memory(kept: Mapping[str, Any], engine: Engine) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return what is kept as the parameters lie now, in type, device and order, and the names that the model lacks."""
    parameters, layouts = local_tensors(engine.module), _layouts_of(engine.module)
    fitted: dict[str, dict[str, Tensor]] = {}
    gone: set[str] = set()
    for scope, kind in [(each, kind) for each in SCOPES for kind in kept[each]["memory"]]:
        fitted[kind] = {}
        for name, tensor in kept[scope]["memory"][kind].items():
            if name not in parameters:
                gone.add(name)
                continue
            parameter = parameters[name]
            numel = engine.levels.share_numel(parameter.numel()) if scope == SHARE else parameter.numel()
            if tensor.numel() != NUMBERS.get(kind, numel):
                raise ValueError(
                    f"there is a {kind} of {tensor.numel()} elements for the parameter {name!r}, which has"
                    f" {parameter.numel()}: its shape has changed since"
                )
            if kind not in NUMBERS:
                try:
                    tensor = _laid_as_now(tensor, scope, engine, kept["layouts"][name], layouts[name])
                except ValueError as error:
                    raise ValueError(f"there is a {kind} that does not fit the parameter {name!r}: {error}") from error
            fitted[kind][name] = tensor.to(parameter.device, widened(parameter.dtype))
    if not engine.pipeline.compressor.feedback.follows_learning_rate:
        fitted.pop(RATES, None)
    return fitted, sorted(gone)


def _laid_as_now(tensor: Tensor, scope: str, engine: Engine, before: Any, now: list[Any]) -> Tensor:
    """Return what this rank keeps of a parameter in the order in which it lies in memory now."""
    if before == now:
        return engine.levels.share_of(tensor) if scope == RANK else tensor
    if scope == SHARE:
        raise ValueError(
            f"it was saved with the shape and the order {before}, and has {now} now. Of the ranks of a node each keeps"
            " a share of it: resume with the same memory_format, or with levels=1"
        )
    shape, strides, cut = now
    if before[::2] != [shape, cut]:
        raise ValueError(
            f"it was saved with the shape {before[0]}, and has {shape} now, or was cut along another dimension"
        )
    try:
        earlier = tensor.as_strided(shape, before[1])
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{before!r} is no layout") from error
    flat = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(earlier)
    flat = laid_flat(flat)
    return engine.levels.share_of(flat) if scope == RANK else flat


def _layouts_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return, by name, shape and strides of what a rank has of each parameter, and the dimension along which it is cut.

    What is kept of it lies as its gradient does in DDP: as the parameter where that fills its memory, else row by row.
    """
    layouts = {}
    for name, parameter in module.named_parameters():
        held = local_tensor(parameter)
        fills = torch.ops.aten.is_non_overlapping_and_dense(held)
        strides = held.stride() if fills else torch.empty(held.shape, device="meta").stride()
        alike = [stride if size > 1 else 1 for size, stride in zip(held.shape, strides)]
        cut = max((getattr(each, "dim", 0) for each in getattr(parameter, "placements", ())), default=0)
        layouts[name] = [list(held.shape), alike, cut]
    return layouts


def states_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return what this rank holds of the states of optimizers: of each parameter, and of groups, in their order."""
    states = []
    for each in optimizers:
        whole = each.state_dict()
        groups = [{name: group[name] for name in _learned_names(each, group)} for group in whole["param_groups"]]
        states.append({**_mapped(lambda tensor, _: local_tensor(tensor), whole["state"]), _GROUPS: groups})
    return states


def load_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Have optimizers go on from what :func:`states_of` returned."""
    for optimizer, state in zip(optimizers, states):
        present = optimizer.state_dict()
        of_parameters = {number: each for number, each in state.items() if number != _GROUPS}
        groups = [{**group, **own} for group, own in zip(present["param_groups"], state[_GROUPS])]
        state = _mapped(as_dtensor, of_parameters, present["state"])
        optimizer.load_state_dict({**present, "state": state, "param_groups": groups})


def _learned_names(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str]:
    """Return what an optimizer keeps in a group for itself, such as the distance that Prodigy learns, of a rank's own.

    What users and schedulers set there, which a constructor names, is for the file of the model.
    """
    given = inspect.signature(type(optimizer).__init__).parameters
    return group.keys() - given.keys() - _OF_THE_MODEL


def _mapped(change: Callable[[Tensor, Any], Tensor], state: Any, like: Any = None) -> Any:
    """Return nested dictionaries with their tensors changed, each by what is in its place in others ``like`` them."""
    if isinstance(state, Tensor):
        return change(state, like)
    if not isinstance(state, dict):
        return state
    others = like if isinstance(like, dict) else {}
    return {key: _mapped(change, each, others.get(key)) for key, each in state.items()}
