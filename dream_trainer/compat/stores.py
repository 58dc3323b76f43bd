"""PyTorch's stores, under the one name that type checkers know them by: `torch.distributed` exports them to nobody."""

from __future__ import annotations

import torch.distributed  # noqa: F401  # which makes the module below
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
