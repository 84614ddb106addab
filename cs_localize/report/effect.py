"""Where the effects of a study's method come from, in words."""

from __future__ import annotations

from cs_localize.config import StudyConfig

_ALONE = "Score lost with the head alone zeroed, mean over"
_SOURCES = {
    "sweep": f"{_ALONE} all search items.",
    "thin_sweep": f"{_ALONE} a few search items.",
    "greedy": f"{_ALONE} all search items. After the first, heads are ranked by what they take on top of those before.",
    "stepwise": "Score lost when the head is zeroed, estimated from the requests that found the first head. "
    "Heads chosen after it are ranked by what they take on top of those before.",
    "thompson": f"{_ALONE} the search items that Thompson sampling chose for it and one without damage.",
    "attribution": "First-order estimate of the score lost when the head is zeroed: the slope of the score by a factor "
    "on the head's output, mean over all search items. Nothing was zeroed for it.",
    "random": "None is estimated; the heads come in random order.",
}


def effect_source(study: StudyConfig) -> str:
    """One or two sentences on how the effects in heads.json were had."""
    if study.method.name != "sparse":
        return _SOURCES[study.method.name]
    shared = (
        "every request has its own random set"
        if study.design.unit == "request"
        else "every block of items shares a random set"
    )
    then = " Of heads tried alone afterwards, the mean of what each then took." if study.design.rounds > 1 else ""
    return (
        f"Score lost when the head is zeroed, estimated by the {study.solver.name} solver from requests in which "
        f"{shared} of heads zeroed ({study.design.kind} masks).{then}"
    )
