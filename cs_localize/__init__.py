"""Find the attention heads a language model needs for a capability, and show that the answer holds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cs_localize.config import EngineConfig as EngineConfig
    from cs_localize.engine import Engine as Engine
    from cs_localize.heads import Ablation as Ablation
    from cs_localize.heads import Head as Head
    from cs_localize.outcomes import Item as Item
    from cs_localize.outcomes import Outcome as Outcome

__version__ = "0.1.0"

# Imported when they are asked for, so that importing the package loads nothing heavy.
_PUBLIC = {
    "Ablation": "cs_localize.heads",
    "Engine": "cs_localize.engine",
    "EngineConfig": "cs_localize.config",
    "Head": "cs_localize.heads",
    "Item": "cs_localize.outcomes",
    "Outcome": "cs_localize.outcomes",
}
__all__ = ["Ablation", "Engine", "EngineConfig", "Head", "Item", "Outcome", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
