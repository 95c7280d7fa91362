"""The oldest companions that this package works beside."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

OLDEST = {"sentence-transformers": "6.0", "transformers": "5.0"}


def require_companions() -> None:
    """Refuse to run beside companions that are missing or too old, which would fail later with a riddle.

    Raises:
        ImportError: One line that names the package, the version found and the version needed.

    Example:
        >>> require_companions()
    """
    for package, oldest in OLDEST.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or Version(found) < Version(oldest):
            raise ImportError(
                f'st-sparse-rescale needs {package}>={oldest}, found {found}: pip install -U "{package}>={oldest}"'
            )
