from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_localize.heads import ModelShape
from cs_localize.measure.planted import PlantedOptions
from cs_localize.methods import Sparse
from cs_localize.plan.simulation import PlantedWorld, background_of, expected, fitting, wilson
from cs_localize.seeds import stream
from tests.methods.builders import EngineMeasurer
from tests.plan.builders import planned

TASKS = ("antonyms", "capitals")
EASY = PlantedOptions(TASKS, n_specific=2, n_universal=2, background=0.01, noise=0.0)


def test_more_requests_find_more_and_enough_of_them_nearly_all() -> None:
    worlds = [PlantedWorld(planned(), EASY, number) for number in range(5)]

    few, many = (expected(worlds, "request", requests) for requests in (40, 600))

    assert few is not None
    assert many is not None
    assert few.hit < 0.5 < 0.75 < many.hit
    assert few.recall < many.recall
    assert many.trials == 10
    assert many.hit_interval == pytest.approx(wilson(round(10 * many.hit), 10))
    assert many.hit_interval[0] < 0.75, "ten trials show no more"


def test_a_world_depends_on_its_number_and_the_seed_of_the_study_alone() -> None:
    def marks(number: int, seed: int = 0) -> list[tuple[bool, float]]:
        return PlantedWorld(planned(seed=seed), EASY, number).marks("request", 60)

    assert marks(0) == marks(0)
    assert len({str(marks(*world)) for world in ((0,), (1,), (2,), (0, 1), (1, 1))}) > 1


def test_a_budget_that_can_no_longer_reach_the_wished_hit_rate_is_given_up() -> None:
    worlds = [PlantedWorld(planned(), EASY, number) for number in range(4)]

    assert expected(worlds, "request", 30, least=0.3) is None
    assert expected(worlds, "request", 600, least=0.3) is not None


@pytest.mark.parametrize("background", [0.05, 0.12, 0.3])
def test_the_background_of_a_pilot_is_found_again_and_noise_is_at_most_what_was_assumed(background: float) -> None:
    study = planned(tasks=["antonyms", "capitals", "counting", "plurals"], design__pilot={"requests_a_layer": 8})
    assumed = PlantedOptions(tuple(study.search), n_universal=2, n_specific=2)

    found = []
    for number in range(6):
        pilot = PlantedWorld(study, replace(assumed, background=background), number).pilot()
        assert pilot is not None
        guess = background_of(pilot, study, assumed)
        assert guess.noise <= assumed.noise
        found.append(guess.background)

    assert np.mean(found) == pytest.approx(background, rel=0.35)


def test_where_the_pilot_shows_nothing_there_is_neither_background_nor_noise() -> None:
    study = planned()
    pilot = PlantedWorld(study, replace(EASY, background=0.0), 0).pilot()
    assert pilot is not None
    quiet = replace(pilot, score=pilot.baseline.copy())
    guess = background_of(quiet, study, EASY)
    assert (guess.background, guess.noise) == (0.0, 0.0)


def test_no_more_heads_are_planted_than_there_is_room_for() -> None:
    shape = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=8, ffn=32)
    fewer = fitting(PlantedOptions(TASKS), shape)
    assert fewer is not None
    assert (fewer.n_universal, fewer.n_specific) == (4, 4)
    assert fitting(PlantedOptions(TASKS), replace(shape, layers=1)) is None
    assert fitting(EASY, planned().shape) == EASY


def test_a_study_without_a_pilot_draws_none() -> None:
    assert PlantedWorld(planned(design__pilot={"requests_a_layer": 0}), EASY, 0).pilot() is None


def test_the_marks_are_those_of_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    study = planned()
    world = PlantedWorld(study, EASY, 0)
    truth = {task: list(world.engine.truth(task)) for task in TASKS}

    class Told:
        """A solver that is told the strongest head of each task, and one wrong one."""

        effects_ = np.zeros((2, study.shape.n_heads))

        def fit(self, table: object) -> Told:
            for row, task in enumerate(TASKS):
                self.effects_[row, study.shape.index(truth[task][0])] = 3.0
                wrong = next(h for h in range(study.shape.n_heads) if study.shape.head(h) not in truth[task])
                self.effects_[row, wrong] = 1.0 + row
            return self

    monkeypatch.setattr("cs_localize.methods.sparse.make_solver", lambda name: Told())
    marks = world.marks("request", 60)

    assert [hit for hit, _ in marks] == [True, True]
    assert [recall for _, recall in marks][1] == 0.5


def test_a_world_is_searched_by_the_method_of_the_study_itself() -> None:
    study = planned()
    world = PlantedWorld(study, EASY, 3)
    design = study.config.design.model_copy(update={"requests": 200})
    seed = int(stream(study.config.seed, "plan", "3").integers(2**31, size=2)[1])
    found = Sparse(design, study.config.solver, seed).localize(
        EngineMeasurer(world.engine), study.shape, study.search, study.relatives
    )
    hits = [found.ranking[task][0] == next(iter(world.engine.truth(task))) for task in TASKS]
    assert [hit for hit, _ in world.marks("request", 200)] == hits
