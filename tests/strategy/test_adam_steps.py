import copy
import re
from functools import partial

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection
from lightning_sparse.engine.adam.memory import AdamMoments, first_updates
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import assert_goes_on, fits, one_model, refusals
from tests.helpers.resuming import Numbered
from tests.helpers.sparse_ddp import Edges, corrected_steps, parameters_of
from tests.helpers.trainers import with_optimizer

DENSE, REFRESH, STEPS, RATE = 3, 2, 12, 1e-3
CORRECTION = AdamCorrection(warmup_steps=DENSE, density_decay_steps=0, second_moment_interval=REFRESH)
CORRECTED = ["topk", "lags", "omgs", "dgc", "exdyna", "micro", "sdagc"]


def train(rank, *settings):
    torch.manual_seed(0)
    start = {name: parameter.detach().clone() for name, parameter in Edges().named_parameters()}
    history, seen = [], []
    training = corrected_steps(rank, CORRECTION, *settings)
    next(training)
    for ddp, _, _, gradients in training:
        history.append(parameters_of(ddp))
        seen.append({name: gradient.clone() for name, gradient in gradients.items()})
    return history, seen, start


def reference(start, gradients, density, arguments, shares=1):
    """Compute the same steps slowly, for all ranks. ``gradients`` are by rank and step.

    Parameters start in the order of optimizers. Each of ``shares`` shares of a parameter is selected separately.
    """
    (beta1, beta2), decay = arguments.get("betas", (0.9, 0.999)), arguments.get("weight_decay", 0.0)
    is_decoupled = arguments.get("decoupled_weight_decay", False)
    ranks, history, before = len(gradients), [], {}
    weights = {name: tensor.cpu().double() for name, tensor in start.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    waiting = [{name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(ranks)]
    known = dict.fromkeys(weights, DENSE)  # step of each second moment
    # Each second moment has its own turn for the first refresh.
    due = {name: DENSE + 1 + int(number * 0.618034 % 1 * REFRESH) for number, name in enumerate(weights)}
    for step in range(1, len(gradients[0]) + 1):
        is_dense, last = step <= DENSE, step - 1
        for name, weight in weights.items():
            if not is_dense and last >= due[name]:  # gradients of the previous step
                share = max(0.5, beta2 ** (last - known[name]))
                rounded = torch.stack([each.bfloat16() for each in before[name]]).sum(dim=0) / ranks
                unbiased = share * second[name] / (1 - beta2 ** known[name]) + (1 - share) * rounded.double().square()
                second[name] = unbiased * (1 - beta2**last)
                known[name], due[name] = last, last + REFRESH
            mine = [gradients[rank][step - 1][name].cpu().double() for rank in range(ranks)]
            if not is_decoupled:
                mine = [each + decay * weight for each in mine]
            before[name] = mine
            mean = torch.stack(mine).mean(dim=0)
            weight.mul_(1 - RATE * decay * is_decoupled)
            if is_dense:
                first[name].mul_(beta1).add_((1 - beta1) * mean)
                second[name].mul_(beta2).add_((1 - beta2) * mean.square())
                unbiased = second[name] / (1 - beta2**step)
                weight.sub_(RATE * first[name] / (1 - beta1**step) / (unbiased.sqrt() + 1e-8))
                continue
            used = second[name] / (1 - beta2 ** known[name])
            if step == DENSE + 1:
                tail = first[name] * beta1 / (1 - beta1) / (1 - beta1**DENSE) / (used.sqrt() + 1e-8)
                for rank in range(ranks):
                    waiting[rank][name] += tail
            sent = torch.zeros_like(weight)
            for rank in range(ranks):
                waiting[rank][name] += mine[rank] / (
                    (used + 4 * (1 - beta2) * mine[rank].square() / ranks).sqrt() + 1e-8
                )
                size = -(-weight.numel() // shares)
                for flat, sum_of in zip(waiting[rank][name].view(-1).split(size), sent.view(-1).split(size)):
                    chosen = flat.abs().topk(min(len(flat), max(1, round(density * size)))).indices
                    sum_of[chosen] += flat[chosen] / ranks
                    flat[chosen] = 0
            weight.sub_(RATE * sent)
        history.append({name: tensor.clone() for name, tensor in weights.items()})
    return history


CASES = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.95)}, 0.05),
    "AdamW, dense": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.95)}, 0.3),
    "AdamW, slow betas": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.999)}, 0.3),
    "Adam": (torch.optim.Adam, {}, 0.05),
    "decay in the gradient": (torch.optim.Adam, {"weight_decay": 0.1}, 0.05),
    "one by one": (torch.optim.AdamW, {"foreach": False}, 0.05),
    "all at once": (torch.optim.AdamW, {"foreach": True}, 0.05),
    "fused": (torch.optim.AdamW, {"fused": True}, 0.05),
}
ON_LEVELS = ("AdamW", "decay in the gradient")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "local_world_size"), [*((name, 1) for name in CASES), *((name, 2) for name in ON_LEVELS)], ids=str
)
def test_against_a_slow_reference(pools, name, local_world_size):
    kind, arguments, density = CASES[name]
    settings = {"density": density} if local_world_size == 1 else {"density": 0.1, "local_world_size": local_world_size}
    outcomes = pools[2 * local_world_size].run(train, kind, settings, arguments, STEPS)
    is_decoupled = kind is torch.optim.AdamW
    told = {"decoupled_weight_decay": is_decoupled, "weight_decay": 0.01 if is_decoupled else 0.0, **arguments}
    seen = [gradients for _, gradients, _ in outcomes]
    if local_world_size == 2:  # nodes are the ranks of the reference
        pairs = (zip(*seen[first : first + 2]) for first in (0, 2))
        seen = [[{each: (one[each] + other[each]) / 2 for each in one} for one, other in steps] for steps in pairs]
        for history, _, _ in outcomes:
            assert_same(history, outcomes[0][0])
    expected = reference(outcomes[0][2], seen, settings["density"], told, shares=local_world_size)
    assert_close_to(expected, [history for history, _, _ in outcomes])


def assert_close_to(expected, histories):
    for history in histories:
        for step, (ours, theirs) in enumerate(zip(history, expected)):
            for name in theirs:
                mine = ours[name].cpu().double()
                if name == "prime":  # equal gradients: rounding decides the selection
                    torch.testing.assert_close(mine.mean(), theirs[name].mean(), rtol=1e-4, atol=1e-5)
                    continue
                # Ties may be broken differently.
                differ = torch.isclose(mine, theirs[name], rtol=1e-4, atol=1e-5).logical_not().sum()
                assert differ <= 2 + mine.numel() // 500, f"{differ} elements of {name} after step {step + 1}"


def train_changing(rank, as_tensors):
    arguments = {"lr": torch.tensor(RATE) if as_tensors else RATE, "foreach": False}
    training = corrected_steps(rank, CORRECTION, torch.optim.AdamW, {"density": 0.1}, arguments, 8)
    ddp, _, optimizer, _ = next(training)
    group = optimizer.param_groups[0]
    moved = group["params"].pop()
    optimizer.add_param_group({"params": [moved], "weight_decay": 0.5})
    for step, _ in enumerate(training):
        group["lr"] = torch.tensor(RATE / (step + 2)) if as_tensors else float(torch.tensor(RATE / (step + 2)))
        group["weight_decay"], group["eps"] = 0.1 * step, 1e-6
    return parameters_of(ddp)


def test_betas_rates_and_decay_are_followed_as_tensors_and_by_group(pair):
    torch.testing.assert_close(pair.run(train_changing, True), pair.run(train_changing, False), rtol=1e-4, atol=1e-6)


def watched_steps(rank, compressor, wire, steps):
    book = []
    settings = {"compressor": compressor, "density": 0.1, "wire": wire}
    for ddp, engine, optimizer, gradients in corrected_steps(
        rank, CORRECTION, torch.optim.AdamW, settings, {"weight_decay": 0.0}, steps
    ):
        names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        book.append(
            {
                "parameters": parameters_of(ddp),
                "gradients": {name: gradient.clone() for name, gradient in gradients.items()},
                "memory": copy.deepcopy(engine.memory.state_dict()),
                "seconds": {names[each]: state["exp_avg_sq"].clone() for each, state in optimizer.state.items()},
            }
        )
    return book


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("compressor", "wire"), [*((name, "bfloat16") for name in CORRECTED), ("topk", "float32"), ("exdyna", "float32")]
)
def test_replicas_agree_and_no_update_is_lost(pair, compressor, wire):
    one, other = pair.run(watched_steps, compressor, wire, 9)
    for ours, theirs in zip(one, other):
        for kind in ("parameters", "seconds"):
            assert_same(ours[kind], theirs[kind])
    for step in range(DENSE + 2, len(one)):  # from the second corrected step on, all residuals are updates
        for name, before in one[step - 1]["parameters"].items():
            known = int(one[step]["memory"]["second_moment_step"][name])
            owed = torch.zeros_like(before).double()
            for book in (one, other):
                gradient = book[step]["gradients"][name].double()
                used = book[step]["seconds"][name].double() / (1 - 0.999**known)
                owed += gradient / ((used + 0.004 * gradient.square() / 2).sqrt() + 1e-8)
                owed += book[step - 1]["memory"]["update"][name].view_as(before).double()
                owed -= book[step]["memory"]["update"][name].view_as(before).double()
            applied = (before.double() - one[step]["parameters"][name].double()) / RATE
            # Applying an update rounds the parameter to 24 bits.
            atol = 1e-3 + 3e-7 * before.abs().max().item() / RATE
            torch.testing.assert_close(applied, owed / 2, rtol=1e-3, atol=atol)


def poison(rank, compressor, poisoned):
    states, gradients = [], []
    for ddp, engine, optimizer, _ in corrected_steps(
        rank, CORRECTION, torch.optim.AdamW, {"compressor": compressor, "density": 0.1}, {}, poisoned + 3, poisoned
    ):
        states.append(copy.deepcopy((engine.state_dict(), optimizer.state_dict()["state"])))
        gradients.append([each.grad.clone() for each in ddp.parameters() if each.grad is not None])
    finite = [all(gradient.isfinite().all() for gradient in step) for step in gradients]
    return states[poisoned:], finite == [step != poisoned + 1 for step in range(len(finite))]


def learned_of(state):
    """Return unbiased second moments by name, and remove the state that other steps change."""
    engine, optimizer = state
    memory = engine["memory"]
    steps = memory.pop("second_moment_step")
    del memory["refresh_due"], memory["refresh_gradient"]
    names = [name for name, _ in Edges().named_parameters()]
    seconds = {name: state.pop("exp_avg_sq") for name, state in zip(names, optimizer.values(), strict=True)}
    return {name: second / (1 - 0.999 ** int(steps[name])) for name, second in seconds.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("poisoned", [DENSE + 1, DENSE + 2, DENSE + 3])
@pytest.mark.parametrize("compressor", ["topk", "exdyna", "sdagc"])
def test_what_is_not_finite_moves_nothing_that_is_kept(pair, compressor, poisoned):
    for (before, after, later, *_), is_noticed in pair.run(poison, compressor, poisoned):
        assert is_noticed
        learning = list(after[0]["memory"]["refresh_gradient"])
        _, here, there = map(learned_of, (before, after, later))
        assert_same(before, after)
        assert learning
        for name in learning:  # neither the non-finite step nor the next step updates second moments
            torch.testing.assert_close(here[name], there[name])


def skip_a_step(rank, poisoned, is_reloaded):
    steps = corrected_steps(rank, CORRECTION, torch.optim.AdamW, {"density": 0.1}, {}, poisoned + 4, poisoned)
    for step, (_, engine, *_) in enumerate(steps, start=-1):
        if step == poisoned and is_reloaded:
            engine.load_state_dict(copy.deepcopy(engine.state_dict()))
    return parameters_of(engine.wrapper)


@pytest.mark.parametrize("poisoned", [DENSE + 1, DENSE + 2])
def test_loaded_after_a_skipped_step_it_goes_on_to_the_bit(pair, poisoned):
    found = [pair.run(skip_a_step, poisoned, is_reloaded) for is_reloaded in (False, True)]
    assert_same(*found)


SOON = {
    "compressor": "topk",
    "density": 0.05,
    "optimizer_correction": AdamCorrection(warmup_steps=2, density_decay_steps=2, second_moment_interval=2),
}


class NumberedAdam(Numbered):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.learning_rate_factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByHand(NumberedAdam):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.go_backward(self.rows(batch_index), batch_index)
        optimizer.step()

    def go_backward(self, rows, batch_index):
        self.manual_backward((self.network(rows) - rows).square().mean())
        self.clip_gradients(self.optimizers(), 0.01, "norm")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "settings", "arguments", "save_after"),
    [
        *((NumberedAdam, {"wire": "bfloat16"}, {}, after) for after in (1, 2, 3, 4, 6, 7)),
        *((NumberedAdam, {"compressor": "exdyna", "wire": "bfloat16"}, {}, after) for after in (2, 4, 7)),
        (NumberedAdam, {}, {"gradient_clip_val": 0.01}, 7),
        (ByHand, {}, {}, 7),
    ],
)
def test_resumed_it_goes_on_to_the_bit(pair, tmp_path, module, settings, arguments, save_after):
    assert_goes_on(pair, tmp_path, {**SOON, **settings}, module, save_after, **arguments)


def test_a_checkpoint_goes_on_with_plain_adamw_and_the_reverse(pair, tmp_path):
    paths = {name: str(tmp_path / f"{name}.ckpt") for name in ("ours", "theirs")}
    saved = {"ours": SOON, "theirs": None}
    ended = {name: fits(pair, partial(NumberedAdam, 8, path), saved[name])[0].end for name, path in paths.items()}
    plain, *_ = fits(pair, NumberedAdam, None, paths["ours"])
    started, *_ = fits(pair, NumberedAdam, SOON, paths["theirs"])
    for name in started.kept["memory"]["update"]:
        # Each fit has four steps of at most 0.01 left.
        assert (plain.end[name] - ended["ours"][name]).abs().max() < 0.05
        assert (started.end[name] - ended["theirs"][name]).abs().max() < 0.05
    assert started.kept["memory"]["update"].keys() == started.end.keys()
    # The second moment exists, so no warm-up is needed.
    assert started.total["density"] == pytest.approx(0.05, abs=0.01)


class Unfreezing(NumberedAdam):
    def __init__(self):
        super().__init__()
        self.network[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.network[2].parameters(), lr=0.01)

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 0 and batch_idx == 4:
            self.network[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.network[0].parameters())})


def test_a_parameter_that_joins_late_is_sent_whole_first(pair):
    densities = [stats["density"] for stats in one_model(fits(pair, Unfreezing, SOON)).stats]
    assert densities[3] < 0.3  # only the last layer, corrected
    assert densities[4] > 0.4  # half of the elements join
    assert densities[5] > 0.4
    assert densities[-1] < 0.1


class Stepless(torch.optim.Adam):
    def step(self, closure=None):
        return None if closure is None else closure()


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.SGD, torch.optim.NAdam, Stepless])
def test_what_cannot_be_corrected_is_refused_where_it_was_asked_for(pair, kind):
    for answer in refusals(pair, partial(with_optimizer, kind, lr=0.01), SOON):
        assert re.match(rf"ValueError.*AdamCorrection.*{kind.__name__}", answer)


@pytest.mark.parametrize(("million", "turns"), [(0.4, 1), (2.7, 5), (100, 10)])
def test_the_larger_a_model_the_more_turns_its_second_moments_take(million, turns):
    tensors = 3 * [torch.empty(2, device="meta")]
    moments = AdamMoments(100, *tensors, 0.9, 0.999, 1e-8, 0.0, round(20_000 * million), False)
    due = first_updates(dict.fromkeys(map(str, range(50)), moments), 10)
    assert sorted(set(due.values())) == list(range(100, 110, 10 // turns))


class InHalves(ByHand):
    def __init__(self, is_halved):
        super().__init__()
        self.is_halved = is_halved
        self.network = nn.Sequential()
        self.weight = nn.Parameter(torch.linspace(1e-3, 2e-3, 100))

    def go_backward(self, rows, batch_index):
        losses = self.weight * torch.linspace(1, 3, 100, device=self.device) * (1 + rows.mean())
        shared = losses.sum() * 0.1 if self.is_halved else 0.0
        for loss in (losses[:50].sum() + shared, losses[50:].sum() - shared) if self.is_halved else (losses.sum(),):
            self.manual_backward(loss, retain_graph=self.is_halved)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {"weight_decay": 200.0}), (torch.optim.SGD, {})],
    ids=["AdamW", "Adam", "SGD"],
)
def test_halves_of_a_step_are_owed_and_teach_as_much_as_the_whole(pair, kind, arguments):
    corrected = {} if kind is torch.optim.SGD else {"optimizer_correction": CORRECTION}
    came, seconds = [], []
    for is_halved in (False, True):
        module = partial(with_optimizer, kind, partial(InHalves, is_halved), lr=1e-7, **arguments)
        answers = fits(pair, module, {"compressor": "topk", "density": 0.1, **corrected}, limit_train_batches=9)
        owed = sum(each.kept["memory"]["update" if corrected else "residual"]["weight"] for each in answers) / 2
        moved = (answers[0].start["weight"] - answers[0].end["weight"]) / 1e-7  # in learning rates
        came.append(moved + owed)
        seconds += [state["exp_avg_sq"] for state in answers[0].optimizers[0] if corrected]
    torch.testing.assert_close(seconds[:1], seconds[1:], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(*came, rtol=1e-2, atol=2e-2)
