"""Densities whose exchange hides behind backward: the adaptive ones of LAGS-SGD, for groups.

Shi et al., "Layer-wise Adaptive Gradient Sparsification", ECAI 2020 (arXiv 1911.08727), choose for each layer the
lowest compression ratio, at most ``c_u``, whose exchange and selection hide behind the computation of the next layer.
As printed, the formula takes the larger of ``c_u`` and that ratio; only the smaller makes ``c_u`` an upper bound. The
released code never runs the rule, leaves out the time of selection in it, and sends a twentieth of a layer that would
hide as a whole. Here a group takes the place of a layer, and a whole one is sent whole.
"""

from collections.abc import Sequence

from lightning_sparse.schedule.step_profile import Profile

_SAFE = 0.8  # of the time there is: what hides to the last microsecond stands out at the first disturbance


def hidden_densities(profile: Profile, stops: Sequence[int]) -> list[float]:
    """Return for each group the largest density whose exchange ends before the next group is ready, up to 1.

    The last group, and one whose exchange is late already, get the density of the profile's counts: nothing hides them.
    No group is sent whole unless the profile knows the time of that.
    """
    densities, free, start = [], 0.0, 0
    for stop, following in zip(stops, [*stops[1:], None]):
        begin = max(free, profile.ready[stop])
        room = 0.0 if following is None else _SAFE * (profile.ready[following] - begin)
        counts = _largest_count(profile, start, stop, room)
        elements = profile.elements[stop] - profile.elements[start]
        densities.append(counts / max(1, elements))
        free = begin + profile.group_seconds(start, stop, counts)
        start = stop
    return densities


def _largest_count(profile: Profile, start: int, stop: int, room: float) -> int:
    """Bisect: no cost falls with the count."""
    elements = profile.elements[stop] - profile.elements[start]
    if profile.is_dense(start, stop) or profile.group_seconds(start, stop, elements) <= room:
        return elements
    lower, upper = profile.counts[stop] - profile.counts[start], elements
    while upper - lower > 1:
        middle = (lower + upper) // 2
        fits = profile.group_seconds(start, stop, middle) <= room
        lower, upper = (middle, upper) if fits else (lower, middle)
    return lower
