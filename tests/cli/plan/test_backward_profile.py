"""A profile of backward: what makes sense, and what is kept of it."""

import math
from pathlib import Path

import pytest

from lightning_sparse.cli.plan import BackwardProfile

PROFILE = BackwardProfile(("head", "body"), (10, 20), (0.1, 0.2), 0.3, 2, "cpu", 4)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert BackwardProfile.load(tmp_path / "profile.json") == PROFILE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": (), "sizes": (), "backward_seconds": ()}, "no parameter of the model requires a gradient"),
        ({"sizes": (10,)}, "names has 2 entries and sizes has 1 entries and backward_seconds has 2 entries"),
        ({"backward_seconds": (0.1, 0.2, 0.3)}, "backward_seconds has 3 entries: pass one each"),
        ({"backward_seconds": (0.1, -0.2)}, r"backward_seconds\[1\]=-0.2 must be finite seconds, at least 0"),
        ({"backward_seconds": (math.nan, 0.2)}, r"backward_seconds\[0\]=nan must be finite"),
        ({"backward_seconds": ("fast", 0.2)}, r"backward_seconds\[0\]='fast' must be finite"),
        ({"other_seconds": math.inf}, "other_seconds=inf must be finite"),
        ({"other_seconds": -1.0}, "other_seconds=-1.0 must be finite"),
        ({"sizes": (10, 0)}, r"sizes\[1\]=0 must be a whole number of elements, at least 1"),
        ({"sizes": (10.5, 1)}, r"sizes\[0\]=10.5 must be a whole number"),
    ],
)
def test_profiles_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PROFILE._replace(**changes).checked()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 0}', '{"version": 1, "names": ["one"]}'])
def test_files_that_hold_something_else_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"holds no profile of version 1.*--save-profile"):
        BackwardProfile.load(path)


def test_a_changed_number_of_workers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"workers=8, but the profile was measured for 4.*Profile the model again"):
        PROFILE.for_workers(8)


def test_somebody_has_to_say_the_number_of_workers() -> None:
    assert PROFILE.for_workers(None).workers == 4
    assert PROFILE._replace(workers=None).for_workers(8).workers == 8
    with pytest.raises(ValueError, match=r"workers=None is not known.*--workers 16"):
        PROFILE._replace(workers=None).for_workers(None)
