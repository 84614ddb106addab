"""Does it hold: held-out confirmation of heads, and heads against neurons."""

from cs_localize.confirm.crosscheck import crosscheck
from cs_localize.confirm.heads import confirm_heads, random_heads
from cs_localize.confirm.interactions import head_interactions

__all__ = ["confirm_heads", "crosscheck", "head_interactions", "random_heads"]
