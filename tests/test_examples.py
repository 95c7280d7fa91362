"""The examples run as they stand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import TEXTS

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_training_with_the_trainer_of_sentence_transformers(tmp_path):
    pairs = [{"query": " ".join(text.split()[:4]), "positive": text} for text in TEXTS * 3]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    command = [sys.executable, str(EXAMPLES / "train_with_st_trainer.py"), "pairs.jsonl", "out", "--steps", "2"]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out" / "model" / "modules.json").exists()
    assert "[(" in ran.stdout
