import math

import pytest
import torch

from lightning_sparse.callbacks import ErrorBudget, Measurement, RuleContext


def context(step=0, epoch=0, asked=0.001, present=0.001):
    return RuleContext(step, epoch, {"weight": asked}, {"weight": present}, 1.0)


def simulated_error(rule, asked, steps, every):
    generator = torch.Generator().manual_seed(0)
    residual, density = torch.zeros(2000), asked
    errors, densities = [], []
    for step in range(steps):
        gradient = torch.randn(2000, generator=generator)
        residual += gradient
        residual[residual.abs().topk(max(1, round(density * 2000))).indices] = 0.0
        if (step + 1) % every == 0:
            norms = Measurement({"weight": float(gradient.norm())}, {"weight": float(residual.norm())})
            now = context(step, asked=asked, present=density)
            rule.observe(norms, now)
            density = max(asked, rule.minimum_densities(now).get("weight", 0.0))
            errors.append(float(residual.norm() / gradient.norm()))
            densities.append(density)
    return errors, densities


@pytest.mark.parametrize("budget", [2.0, 4.0, 8.0])
def test_an_error_settles_within_its_budget(budget):
    without, _ = simulated_error(ErrorBudget(1e9), asked=0.001, steps=2000, every=10)
    errors, densities = simulated_error(ErrorBudget(budget), asked=0.001, steps=2000, every=10)
    assert without[-1] > 1.5 * budget
    settled = errors[len(errors) // 2 :]
    assert sum(error <= 1.1 * budget for error in settled) > 0.9 * len(settled)
    assert sum(settled) / len(settled) > 0.5 * budget  # the density is not larger than necessary
    assert max(densities[len(densities) // 2 :]) < 0.5


def test_a_budget_that_is_kept_anyway_changes_nothing():
    _, densities = simulated_error(ErrorBudget(1000.0), asked=0.01, steps=300, every=10)
    assert set(densities) == {0.01}


def test_gradients_that_say_nothing_leave_a_density_as_it_is():
    rule = ErrorBudget(2.0)
    rule.observe(Measurement({"weight": 1.0}, {"weight": 3.0}), context())
    before = rule.minimum_densities(context())
    assert before == {"weight": pytest.approx(0.0015)}
    for gradient, residual in ((0.0, 3.0), (math.nan, 3.0), (math.inf, 3.0), (1.0, math.nan)):
        rule.observe(Measurement({"weight": gradient}, {"weight": residual}), context())
        assert rule.minimum_densities(context()) == before


def test_what_was_learned_goes_on():
    rule, resumed = ErrorBudget(2.0), ErrorBudget(2.0)
    for epoch in range(3):
        rule.minimum_densities(context(epoch=epoch))
        rule.observe(Measurement({"weight": 1.0}, {"weight": 4.0}), context(epoch=epoch))
    resumed.load_state_dict(rule.state_dict())
    assert resumed.minimum_densities(context(epoch=3)) == rule.minimum_densities(context(epoch=3))
    rule.begin()
    assert rule.state_dict() == ErrorBudget(2.0).state_dict()


def test_a_budget_out_of_range_is_refused():
    with pytest.raises(ValueError, match="budget"):
        ErrorBudget(0.0)
