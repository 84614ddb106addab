"""The study file: everything a user can choose, validated before anything is spent."""

from cs_localize.config.files import INCLUDE_PATH, check_files, check_yaml_folder, named_files
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
    "INCLUDE_PATH",
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
    "check_files",
    "check_yaml_folder",
    "dump_study",
    "first_problem",
    "load_study",
    "named_files",
    "parse_study",
]
