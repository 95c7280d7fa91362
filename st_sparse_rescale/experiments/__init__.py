"""Experiments: sweeps over backbones and settings, and what they show."""

from st_sparse_rescale.experiments.grid import GridError, load_grid
from st_sparse_rescale.experiments.sweep import run_sweep

__all__ = ["GridError", "load_grid", "run_sweep"]
