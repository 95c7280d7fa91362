"""Which third-party programs run on this machine, found out in a process that can be given up.

An engine that never answers, because a sandbox lacks something that it needs, would hold up all tests for ever.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default Ray's workers give way to all else, and a busy machine never gets to them
}

RAY = """
import ray, ray.data, torch
class Scale:
    def __init__(self, layer):
        import sentence_transformers  # which is most of what an encoding actor loads
        self.layer = ray.get(layer)
    def __call__(self, batch):
        return {"item": batch["item"] * self.layer.weight.item()}
ray.init(log_to_driver=False)
layer = torch.nn.Linear(1, 1)
torch.nn.init.constant_(layer.weight, 2)
numbers = ray.data.from_items([1, 2], override_num_blocks=2).map_batches(
    Scale, fn_constructor_args=[ray.put(layer)], compute=ray.data.ActorPoolStrategy(size=2), num_cpus=1
)
assert sorted(row["item"] for row in numbers.iter_rows()) == [2, 4]
"""

MILVUS = """
import os, tempfile, pymilvus
client = pymilvus.MilvusClient(os.path.join(tempfile.mkdtemp(), "milvus.db"))
client.create_collection("vectors", dimension=2)
client.insert("vectors", [{"id": 7, "vector": [1.0, 0.0]}])
assert client.search("vectors", data=[[1.0, 0.0]], limit=1)[0][0]["id"] == 7
client.close()
"""


@functools.cache
def hindrance(program: str, seconds: float = 120) -> str | None:
    """Why a Python program does not run through on this machine, or None."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **RAY_ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what it starts is given up with it
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"it does not answer within {seconds:g} s on this machine"
    if process.returncode == 0:
        return None
    return f"it does not run on this machine: {(errors.strip().splitlines() or ['no message'])[-1]}"
