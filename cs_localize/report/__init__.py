"""Figures, one self-contained HTML page, and the short table a command prints at its end."""

from __future__ import annotations

from cs_localize.report.figures import heatmap_svg
from cs_localize.report.page import write_report
from cs_localize.report.summary import summary_lines

__all__ = ["heatmap_svg", "summary_lines", "write_report"]
