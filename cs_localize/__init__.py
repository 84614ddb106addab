"""Find the attention heads a language model needs for a capability, and show that the answer holds."""

__version__ = "0.1.0"
