"""Where code that a model wrote is executed: in processes without a network, the user's files, or time without end."""

from cs_localize.sandbox.run import Limits, passes, unavailable

__all__ = ["Limits", "passes", "unavailable"]
