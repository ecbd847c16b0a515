from itertools import product
from types import SimpleNamespace

from tests.helpers.tiers import sample, values_of


class Case:
    def __init__(self, **params):
        self.callspec = SimpleNamespace(params=params)


def test_a_sample_has_every_value_of_every_argument_in_few_cases():
    cases = [Case(letter=letter, number=number) for letter, number in product("abcd", range(3))]
    chosen = sample(cases)
    assert len(chosen) == 4
    assert set().union(*map(values_of, chosen)) == set().union(*map(values_of, cases))


def test_a_sample_is_no_larger_than_it_may_be():
    cases = [Case(number=number) for number in range(10)]
    assert [len(sample(cases, most)) for most in (1, 3, 10, 20)] == [1, 3, 10, 10]
