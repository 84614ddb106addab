"""The methods by the name a study gives them."""

from __future__ import annotations

from dataclasses import fields

from cs_localize.config import StudyConfig
from cs_localize.errors import UsageError
from cs_localize.methods.attribution import Attribution, Slopes, no_slopes
from cs_localize.methods.greedy import Greedy
from cs_localize.methods.method import Method
from cs_localize.methods.simple import ExhaustiveSweep, RandomHeads, ThinSweep
from cs_localize.methods.sparse import Sparse
from cs_localize.methods.stepwise import Stepwise
from cs_localize.methods.thompson import Thompson

METHODS: dict[str, type[Method]] = {
    "sparse": Sparse,
    "sweep": ExhaustiveSweep,
    "thin_sweep": ThinSweep,
    "greedy": Greedy,
    "stepwise": Stepwise,
    "thompson": Thompson,
    "attribution": Attribution,
    "random": RandomHeads,
}
"""Every method by the name a study gives it."""


def make_method(config: StudyConfig, slopes: Slopes = no_slopes) -> Method:
    """Builds the method of a study.

    The options of ``method`` become its fields. A field called ``design``, ``solver`` or ``seed`` is no option: it gets
    what the study has under that name, and one called ``slopes`` what is given here. ``limit`` gets how many heads may
    be named, and ``reserved`` how many items of a task the tests of single heads need to themselves.

    Args:
        config: the study.
        slopes: computes what a method of gradients needs.

    Raises:
        UsageError: on an unknown option, or a value out of range.
    """
    name, options = config.method.name, config.method.options
    given = {
        "design": config.design,
        "solver": config.solver,
        "seed": config.seed,
        "slopes": slopes,
        "limit": config.select.limit,
        "reserved": config.select.reserved,
    }
    known = [field.name for field in fields(METHODS[name])]  # type: ignore[arg-type]  # every method is a dataclass
    own = [field for field in known if field not in given]
    unknown = sorted(set(options) - set(own))
    if unknown:
        has = ", ".join(own) or "none"
        raise UsageError(f"method '{name}' has no option '{unknown[0]}'; it has {has}")
    method = METHODS[name](**options, **{field: value for field, value in given.items() if field in known})
    method.check_options()
    return method
