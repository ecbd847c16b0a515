"""Samples of test cases for ``make test``. ``make test-all`` runs all cases."""

from collections import Counter

import pytest


def exhaustive(values):
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def values_of(item):
    params = item.callspec.params
    if check := params.get("check"):
        params = {"compressor": check.compressor, **check.case}
    return {(name, repr(value)) for name, value in params.items()}


def sample(items, most=None):
    """Return about the fewest cases that cover every value of every argument, and at most ``most`` cases."""
    values = {item: values_of(item) for item in items}
    missing, chosen, times = set().union(*values.values()), [], Counter()

    def worth(item):
        return len(values[item] & missing), -sum(times[value] for value in values[item])

    while missing:
        best = max(items, key=worth)
        chosen.append(best)
        missing -= values[best]
        times.update(values[best])
    in_order = [item for item in items if item in chosen]
    return in_order if most is None else in_order[:: -(-len(in_order) // most)]
