"""Models: from a name to a local directory and its geometry."""

from __future__ import annotations

from cs_localize.models.cache import home
from cs_localize.models.random import random_model
from cs_localize.models.resolve import KnownModel, LocalModel, known_models, resolve
from cs_localize.models.shape import read_shape

__all__ = ["KnownModel", "LocalModel", "home", "known_models", "random_model", "read_shape", "resolve"]
