"""A parallelism from outside of the package: ranks that see different data have a part of an embedding's rows each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import Shard, distribute_tensor

import dream_trainer as dt
from dream_trainer.parallel.axis import AxisSetup, MeshParallelism


class Table(nn.Embedding):
    group: Any = None  # the ranks that have its rows, once they are divided

    def forward(self, ids: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(ids)
        weight, rank = self.weight.to_local(), self.group.rank()  # type: ignore[operator]
        every = [torch.empty_like(ids) for _ in range(self.group.size())]
        torch.distributed.all_gather(every, ids.contiguous(), group=self.group)
        places = torch.stack(every) - rank * len(weight)
        is_here = (places >= 0) & (places < len(weight))
        rows = F.embedding(places.where(is_here, 0), weight) * is_here.unsqueeze(-1)
        return all_reduce(rows, group=self.group)[rank]


class DividedRows(MeshParallelism):
    def value(self, config: Any) -> int:
        return config.table_ranks

    def split(self, setup: AxisSetup, mesh: Any) -> None:
        for table in (part for model in setup.models.values() for part in model.modules() if isinstance(part, Table)):
            weight = distribute_tensor(table.weight.detach(), mesh["rows"], [Shard(0)], src_data_rank=None)
            table.weight, table.group = nn.Parameter(weight), mesh["rows"].get_group()

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        divided = [
            (part, part.weight, part.group) for part in model.modules() if isinstance(part, Table) and part.group
        ]
        for table, weight, _ in divided:
            table.weight, table.group = nn.Parameter(weight.full_tensor(), requires_grad=False), None
        yield
        for table, weight, group in divided:
            table.weight, table.group = weight, group


class RowsMixin(dt.AbstractTrainer):
    _parallelism = DividedRows("rows", "beside experts", order=45, dimension="rows", is_among_data=True)


@dataclass(kw_only=True)
class RowsConfig(dt.DreamTrainerConfig):
    table_ranks: int = 1
