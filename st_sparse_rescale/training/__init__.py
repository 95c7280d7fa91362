"""Training: data, recipes, callbacks and the entry that puts them together."""

from st_sparse_rescale.training.callbacks import CollapseError, CollapseGuard, JointFlopsScheduler
from st_sparse_rescale.training.data import DataError, load_training_data
from st_sparse_rescale.training.distillation import score
from st_sparse_rescale.training.inference_free import NonNegativeQueries, idf_query_encoder
from st_sparse_rescale.training.mining import Mined, mine
from st_sparse_rescale.training.negative_filter import NegativeFilter
from st_sparse_rescale.training.recipe import Recipe, RecipeError
from st_sparse_rescale.training.train import TrainResult, train

__all__ = [
    "CollapseError",
    "CollapseGuard",
    "DataError",
    "JointFlopsScheduler",
    "Mined",
    "NegativeFilter",
    "NonNegativeQueries",
    "Recipe",
    "RecipeError",
    "TrainResult",
    "idf_query_encoder",
    "load_training_data",
    "mine",
    "score",
    "train",
]
