"""Training: data, recipes, callbacks and the entry that puts them together."""

from st_sparse_rescale.training.callbacks import CollapseError, CollapseGuard, JointFlopsScheduler
from st_sparse_rescale.training.data import DataError, load_training_data
from st_sparse_rescale.training.recipe import Recipe, RecipeError
from st_sparse_rescale.training.train import TrainResult, train

__all__ = [
    "CollapseError",
    "CollapseGuard",
    "DataError",
    "JointFlopsScheduler",
    "Recipe",
    "RecipeError",
    "TrainResult",
    "load_training_data",
    "train",
]
