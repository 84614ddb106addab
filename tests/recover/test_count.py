from __future__ import annotations

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.recover import adds_specific_damage

CLEAR = np.array([2.0, 3.0, 2.5, 1.5])
NOTHING = np.zeros(6)


def test_a_head_counts_that_damages_its_task_and_not_the_controls() -> None:
    assert adds_specific_damage(CLEAR, NOTHING)
    assert adds_specific_damage(CLEAR, np.empty(0)), "a task without controls stands on its own damage"


def test_a_head_does_not_count_that_damages_the_controls_clearly_more_than_a_third_as_much() -> None:
    assert not adds_specific_damage(CLEAR, np.full(6, 1.2))
    assert adds_specific_damage(CLEAR, np.full(6, 1.2), ratio=1.0)


def test_a_shortfall_against_the_controls_within_its_error_is_let_pass() -> None:
    assert adds_specific_damage(CLEAR, np.full(6, 0.8)), "2.25 against 3 x 0.8, with an error of 0.32"
    assert adds_specific_damage(CLEAR, np.array([0.0, 0.0, 0.0, 0.0, 0.0, 6.0])), "one odd control item"


def test_a_gain_of_the_controls_does_not_count_for_the_head() -> None:
    assert not adds_specific_damage(np.array([0.1, -0.1, 0.0, 0.05]), np.full(6, -2.0))


def test_damage_within_its_noise_does_not_count() -> None:
    assert not adds_specific_damage(np.array([4.0, -3.5, 0.1, 0.0]), NOTHING)
    assert not adds_specific_damage(-CLEAR, NOTHING)


def test_damage_that_was_not_measured_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="must be finite"):
        adds_specific_damage(np.array([1.0, np.nan]), NOTHING)
    with pytest.raises(UsageError, match="at least one item"):
        adds_specific_damage(np.empty(0), NOTHING)
    with pytest.raises(UsageError, match="ratio is -1"):
        adds_specific_damage(CLEAR, NOTHING, ratio=-1.0)
