"""The mean over the whole batch, whichever processes hold its rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def global_mean(rows: Tensor) -> Tensor:
    """Average rows over every data-parallel process, differentiably.

    FLOPS is the square of a mean, so averaging per-process FLOPS is not the FLOPS of the batch: a term used by one
    process only would be charged more. Sum and count are reduced, so unequal and even empty shares of the batch are
    weighted rightly.

    The gradient is scaled by the number of processes W. Every process computes the same function of the same mean, and
    DistributedDataParallel divides the summed gradients by W: the two cancel, and the parameters receive exactly the
    gradient of one process that holds all rows. Without an initialised process group this is ``rows.mean(dim=0)``.

    Args:
        rows: Shape (local rows, V); the number of local rows may differ between processes and may be 0.

    Returns:
        Shape (V,), at least float32 even for half-precision rows; zeros if there are no rows anywhere.

    Example:
        >>> global_mean(torch.tensor([[1.0, 0.0], [3.0, 2.0]])).tolist()
        [2.0, 1.0]
    """
    local_sum = rows.sum(dim=0, dtype=torch.promote_types(rows.dtype, torch.float32))
    count = torch.tensor(len(rows), device=rows.device)
    if not (dist.is_available() and dist.is_initialized()):
        return local_sum / count.clamp(min=1)

    total = local_sum.detach().clone()
    dist.all_reduce(total)
    dist.all_reduce(count)
    # The second summand is zero in value; it only carries the gradient.
    return (total + dist.get_world_size() * (local_sum - local_sum.detach())) / count.clamp(min=1)
