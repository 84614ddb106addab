"""Grids of studies: models x task sets x methods, on one ledger."""

from __future__ import annotations

from cs_localize.grid.config import Cell, GridConfig, load_grid, parse_grid
from cs_localize.grid.run import GridResult, run_grid
from cs_localize.grid.state import CellResult

__all__ = ["Cell", "CellResult", "GridConfig", "GridResult", "load_grid", "parse_grid", "run_grid"]
