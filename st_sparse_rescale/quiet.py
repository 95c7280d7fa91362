"""Leave the screen to our own progress bars."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Turn off the progress bars of transformers and datasets, and all log messages of theirs below errors."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
