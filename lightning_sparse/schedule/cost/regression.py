"""Robust regression with coefficients that are not negative, for a handful of terms; pure numbers."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

Rows = Sequence[tuple[float, ...]]

_ROUNDS = 25
_NEIGHBOURS = 2  # on each side, to see what a target should have been about
_EXACT = 1e-6  # relative errors below this are as good as none
_TRUSTED = 0.75  # fraction of the targets, those fitted best, by which a fit is judged


def fit_rows(rows: Rows, targets: Sequence[float]) -> tuple[list[float], float]:
    """Return the coefficients, none negative, of least absolute relative errors, and the mean error where they fit.

    Least squares are repeated with weights of one over the last error (Schlossmacher, Journal of the American
    Statistical Association 1973). Errors are relative to the target or, where its neighbours are larger, to the median
    of those: a time that is far too short must not weigh the more for it. Targets rise but for noise.
    """
    scales = _scales(targets)
    scaled = [[term / scale for term in row] for row, scale in zip(rows, scales)]
    goals = [target / scale for target, scale in zip(targets, scales)]
    terms = range(len(rows[0]))
    free = _least_absolute(scaled, goals, tuple(terms))
    if min(free) >= 0:
        return free, _trimmed_error(scaled, goals, free)
    subsets = [subset for count in terms for subset in combinations(terms, count)]
    allowed = [values for values in (_least_absolute(scaled, goals, subset) for subset in subsets) if min(values) >= 0]
    best = min(allowed, key=lambda values: sum(_errors(scaled, goals, values)))
    return best, _trimmed_error(scaled, goals, best)


def _scales(targets: Sequence[float]) -> list[float]:
    smallest = min(target for target in targets if target > 0)
    return [
        max(target, median(targets[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1]), smallest)
        for place, target in enumerate(targets)
    ]


def _errors(rows: list[list[float]], goals: list[float], values: Sequence[float]) -> list[float]:
    return [abs(sum(map(float.__mul__, row, values)) - goal) for row, goal in zip(rows, goals)]


def _trimmed_error(rows: list[list[float]], goals: list[float], values: list[float]) -> float:
    errors = sorted(_errors(rows, goals, values))
    trusted = errors[: max(1, round(_TRUSTED * len(errors)))]
    return max(_EXACT, sum(trusted) / len(trusted))


def _least_absolute(rows: list[list[float]], goals: list[float], chosen: tuple[int, ...]) -> list[float]:
    """Fit with some of the terms; the coefficients of the others are 0."""
    values = [0.0] * len(rows[0])
    part = [[row[term] for term in chosen] for row in rows]
    weights = [1.0] * len(goals)
    for _ in range(_ROUNDS if chosen else 0):
        solved = _least_squares(part, goals, weights)
        weights = [1 / max(error, _EXACT) for error in _errors(part, goals, solved)]
        for term, value in zip(chosen, solved):
            values[term] = value
    return values


def _least_squares(rows: list[list[float]], goals: list[float], weights: list[float]) -> list[float]:
    """Solve the normal equations by elimination; a term that the others already make up gets 0."""
    terms = range(len(rows[0]))
    norms = [max((row[term] for row in rows), default=0.0) or 1.0 for term in terms]
    system = [
        [
            *(
                sum(weight * row[left] * row[right] for weight, row in zip(weights, rows)) / norms[left] / norms[right]
                for right in terms
            ),
            sum(weight * row[left] * goal for weight, row, goal in zip(weights, rows, goals)) / norms[left],
        ]
        for left in terms
    ]
    for pivot in terms:
        degenerate = system[pivot][pivot] <= 1e-13 * sum(weights)
        for other in terms:
            if other != pivot and not degenerate:
                factor = system[other][pivot] / system[pivot][pivot]
                system[other] = [left - factor * right for left, right in zip(system[other], system[pivot])]
        if degenerate:
            system[pivot] = [float(term == pivot) for term in terms] + [0.0]
    return [system[term][-1] / system[term][term] / norms[term] for term in terms]
