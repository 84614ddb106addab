from __future__ import annotations

import os

import pytest

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.measure.remote import run_on_worker
from cs_localize.measure.spec import EngineSpec
from tests.measure.toy import toy_spec

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def process_and_threads(spec: EngineSpec, plus: int) -> tuple[int, str]:
    return os.getpid() + plus, os.environ["OMP_NUM_THREADS"]


def refuse(spec: EngineSpec) -> None:
    raise UsageError(f"there is no {spec.name}")


def stumble(spec: EngineSpec) -> None:
    raise ZeroDivisionError("a bug\nover two lines")


def test_every_call_has_a_process_of_its_own_with_the_environment_of_a_worker() -> None:
    calls = [run_on_worker(process_and_threads, toy_spec(), 0, cores=1) for _ in range(2)]
    assert len({os.getpid(), *(pid for pid, _ in calls)}) == 3
    assert {threads for _, threads in calls} == {"1"}


def test_an_error_meant_for_the_user_comes_back_as_it_was() -> None:
    with pytest.raises(UsageError, match=r"^there is no planted$"):
        run_on_worker(refuse, toy_spec(), cores=1)


def test_any_other_error_comes_back_in_one_line() -> None:
    with pytest.raises(
        MeasurementError, match="planted engine failed: ZeroDivisionError: a bug over two lines"
    ) as caught:
        run_on_worker(stumble, toy_spec(), cores=1)
    assert "\n" not in str(caught.value)


def test_more_cores_than_any_machine_has_are_refused_and_not_waited_for() -> None:
    with pytest.raises(UsageError, match="asks for 4096 cores, which no machine of the cluster has"):
        run_on_worker(refuse, toy_spec(), cores=4096)
