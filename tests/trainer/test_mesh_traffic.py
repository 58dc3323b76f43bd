"""What `describe` says that weights and gradients cost over the data-parallel ranks, beside split layers or sequences,
is what is sent there."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.api import format_bytes, step_traffic
from tests.trainer.meshes import Case, Trained, config_of
from tests.worlds import run_world

CASES = [
    Case(dp=2, shard=2, tp=2, steps=3),
    Case(dp=2, shard=1, tp=2, steps=3),
    Case(dp=2, shard=2, cp=2, steps=3),
    Case(dp=2, shard=1, cp=2, steps=3),
    Case(dp=2, shard=2, cp=2, steps=3, accumulation=2),
]
SMALL = 64
"""Elements of what ranks agree by, at most; all gradients together are more."""
BESIDE = 64
"""Numbers that go with them, at most: which parameters have one."""


class Sent(TorchDispatchMode):
    """Bytes that a ring over `n` ranks sends for shards, or for gradients of copies."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.n_bytes = n, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        share = (self.n - 1) / self.n
        match str(func).rpartition(".")[0]:
            case "c10d._allgather_base_" if args[0].numel() == self.n * args[1].numel():  # attention's is of two ranks
                self.n_bytes += share * args[0].nbytes
            case "c10d._reduce_scatter_base_" if args[1].numel() == self.n * args[0].numel():
                self.n_bytes += 2 * share * args[1].nbytes  # gloo reduces for all
            case "c10d.allreduce_" if args[0][0].numel() > SMALL:
                self.n_bytes += 2 * share * args[0][0].nbytes
        return func(*args, **kwargs or {})


class Counting(Trained):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Any]:
        if self.global_step != 1:
            return super().training_step(batch, batch_idx)
        with self.sent:
            return super().training_step(batch, batch_idx)


def count(cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with Counting(config_of(case)) as trainer:
            trainer.sent = Sent(case.dp * case.cp)
            trainer.fit()
            found.append({"sent": trainer.sent.n_bytes, "traffic": step_traffic(trainer), "said": trainer.describe()})
    return found


def test_bytes_of_weights_and_gradients_are_told_beside_split_layers_and_sequences() -> None:
    for ranks in run_world(count, 4, CASES):
        for case, found in zip(CASES, ranks, strict=True):
            dimension = "dp_shard" if case.shard == 2 else "dp_replicate"
            told, sent = found["traffic"].by_dimension.pop(dimension), found["sent"]
            assert not found["traffic"].by_dimension
            by_blocks = case.shard == 2 and case.tp == 2  # others average whole gradients
            assert (told == sent) if by_blocks else (0 <= sent - told < 2 * 8 * BESIDE), case
            assert told > 2**14
            (row,) = (line for line in found["said"].splitlines() if line.startswith(f"| {dimension} |"))
            assert row.endswith(f"| {format_bytes(told)} |")
