"""Options that take several values at once, as in ``--data a b c``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand


class ManyValues(TyperCommand):
    """A command whose list options also take their values in a row; arguments come before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write ``--data a b`` as ``--data a --data b``, which is what the parser knows."""
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        return super().parse_args(ctx, repeated(args, lists))


def repeated(args: Sequence[str], options: Collection[str]) -> list[str]:
    """Repeat each of the given options before each of its values.

    Example:
        ::

            repeated(["m", "--data", "a", "b", "--bm25"], {"--data"})  # ["m", "--data", "a", "--data", "b", "--bm25"]
    """
    written: list[str] = []
    option = None  # whose values may follow
    for arg in args:
        if arg.startswith("-"):
            option = arg if arg in options else None
            written.append(arg)
        elif option is not None and written[-1] != option:
            written += [option, arg]
        else:
            written.append(arg)
    return written
