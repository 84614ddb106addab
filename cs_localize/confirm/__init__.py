"""Does it hold: held-out confirmation of heads, and heads against neurons."""

from cs_localize.confirm.crosscheck import crosscheck
from cs_localize.confirm.heads import confirm_heads, random_heads

__all__ = ["confirm_heads", "crosscheck", "random_heads"]
