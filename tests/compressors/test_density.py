import math

import pytest

from lightning_sparse.callbacks import ErrorBudget, Measurement, RuleContext


def context(step=0, epoch=0, asked=0.001, present=0.001):
    return RuleContext(step, epoch, {"weight": asked}, {"weight": present}, 1.0)


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
