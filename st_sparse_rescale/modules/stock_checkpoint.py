"""Checkpoints that name stock classes only, so that they load anywhere without this package.

In memory our modules are subclasses of sentence-transformers' modules. On disk nothing may tell: a class outside
``sentence_transformers`` in ``modules.json`` would be refused by every consumer that does not trust remote code.
sentence-transformers writes down the classes that it finds, so the model and our modules lend themselves their stock
classes for the time of a save. Every file is then written by stock code, at once, and no foreign name is ever on disk.
"""

from __future__ import annotations

import copyreg
import functools
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from sentence_transformers.base import BaseModel
from sentence_transformers.base.model_card import BaseModelCardData
from sentence_transformers.base.modules import Module
from torch import nn


class SavedAsStock(Module):
    """Mixin of a module that is ours in memory and stock on disk.

    The model that holds such a module is promoted once it is built (see `write_stock_checkpoints`). Modules that are
    put into a built model get no ``on_model_ready`` from sentence-transformers: call it yourself.

    Attributes:
        stock_class: The class of sentence-transformers that this module is saved as.
    """

    stock_class: ClassVar[type[Module]]

    def stock_modules(self) -> list[Module]:
        """The modules that together do in a stock model what this one does; the last one is this module."""
        return [self]

    def before_save(self, card: BaseModelCardData) -> None:
        """Refuse what could not be loaded again, and tell the card of the model what there is to tell."""

    def on_model_ready(self, model: BaseModel) -> None:
        """Promote the built model, so that its checkpoints are stock."""
        super().on_model_ready(model)
        write_stock_checkpoints(model)

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Refuse: a promoted model saves the stock class, so whoever gets here would write our name.

        Raises:
            RuntimeError: Always.
        """
        name = type(self).__name__
        raise RuntimeError(
            f"This {name} belongs to a model that does not know about it, so its checkpoint would need this package "
            f"to load. Call `module.on_model_ready(model)` after putting a {name} into a model that is already built."
        )


def write_stock_checkpoints(model: BaseModel) -> None:
    """Promote the class of a built model, so that whatever saves it writes stock classes only.

    ``save_pretrained``, ``push_to_hub`` and the trainer all go through ``save``. The promoted class keeps the name of
    the model's own class, which stays its base.

    Args:
        model: A built model, e.g. a `SparseEncoder`. A promoted model is left alone.
    """
    if not isinstance(model, StockCheckpoints):
        model.__class__ = _promoted(type(model))


class StockCheckpoints(BaseModel):
    """Mixin of the class of a promoted model."""

    stock_class: ClassVar[type[BaseModel]]
    model_card_data: BaseModelCardData

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as a stock model; takes the arguments of the stock ``save``."""
        self._before_save()
        with _stock_form(self):
            self.model_card_data.register_model(self)  # the card describes the classes that it finds
            self.save(*args, **kwargs)

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Add an adapter as stock does, and refuse one that could not be saved now rather than after the training."""
        super().add_adapter(*args, **kwargs)
        self._before_save()

    def _before_save(self) -> None:
        for module in self.modules():
            if isinstance(module, SavedAsStock):
                module.before_save(self.model_card_data)


class _PromotedMeta(ABCMeta):
    """Marks classes that pickle as the promotion of their base: they are made at run time, under their base's name."""


@functools.cache
def _promoted(base: type[BaseModel]) -> Any:
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return _PromotedMeta(base.__name__, (StockCheckpoints, base), {**names, "stock_class": base})


copyreg.pickle(_PromotedMeta, lambda promoted: (_promoted, (promoted.stock_class,)))  # type: ignore[attr-defined]


@contextmanager
def _stock_form(model: BaseModel) -> Iterator[None]:
    """Give the model and our modules their stock classes, and our modules their stock companions, for a while.

    The model encodes as before meanwhile, but do not encode with it in another thread while its modules change hands.
    """
    ours = {module: type(module) for module in model.modules() if isinstance(module, SavedAsStock | StockCheckpoints)}
    sequences = {
        module: dict(module.named_children()) for module in model.modules() if isinstance(module, nn.Sequential)
    }
    try:
        become_stock(model)
        yield
    finally:
        for module, own_class in ours.items():
            module.__class__ = own_class
        for sequence, children in sequences.items():
            set_children(sequence, children)


def become_stock(model: BaseModel) -> None:
    """Give the model and our modules their stock classes, and our modules their stock companions.

    Args:
        model: A built model; one that is stock is left alone.
    """
    for module in list(model.modules()):
        if isinstance(module, nn.Sequential):
            set_children(module, _with_companions(dict(module.named_children())))
    for module in list(model.modules()):
        if isinstance(module, SavedAsStock | StockCheckpoints):
            module.__class__ = type(module).stock_class  # type: ignore[assignment]


def _with_companions(children: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The children with each of our modules preceded by its companions; all children keep their names."""
    stock: dict[str, nn.Module] = {}
    for name, child in children.items():
        if isinstance(child, SavedAsStock):
            *companions, _ = child.stock_modules()
            stock |= {f"{name}_{type(companion).__name__}": companion for companion in companions}
        stock[name] = child
    return stock


def set_children(sequence: nn.Sequential, children: dict[str, nn.Module]) -> None:
    """Let a sequence hold these modules under these names, in this order."""
    if list(children) == [name for name, _ in sequence.named_children()]:
        return
    for name, _ in list(sequence.named_children()):
        delattr(sequence, name)
    for name, child in children.items():
        sequence.add_module(name, child)
