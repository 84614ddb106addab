"""The study file: everything a user can choose, validated before anything is spent."""

from cs_localize.config.sections import (
    ConfirmConfig,
    CrosscheckConfig,
    DataConfig,
    DesignConfig,
    EngineConfig,
    LmEvalConfig,
    MethodConfig,
    PilotConfig,
    SelectConfig,
    SingleHeadConfig,
    SolverConfig,
)
from cs_localize.config.study import SPARSE_ONLY, StudyConfig, dump_study, first_problem, load_study, parse_study

__all__ = [
    "SPARSE_ONLY",
    "ConfirmConfig",
    "CrosscheckConfig",
    "DataConfig",
    "DesignConfig",
    "EngineConfig",
    "LmEvalConfig",
    "MethodConfig",
    "PilotConfig",
    "SelectConfig",
    "SingleHeadConfig",
    "SolverConfig",
    "StudyConfig",
    "dump_study",
    "first_problem",
    "load_study",
    "parse_study",
]
