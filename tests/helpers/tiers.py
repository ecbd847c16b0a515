"""What ``make test`` runs of many cases, all of which ``make test-all`` runs."""

from collections import Counter

import pytest


def exhaustive(values):
    """Return values of an argument that only ``make test-all`` tries."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def values_of(item):
    """Return the values of a case's arguments; those of a check of the conformance kit are its compressor and case."""
    params = item.callspec.params
    if check := params.get("check"):
        params = {"compressor": check.compressor, **check.case}
    return {(name, repr(value)) for name, value in params.items()}


def sample(items, most=None):
    """Return about as few of a test's cases as have every value of every argument; of more than ``most``, some."""
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
