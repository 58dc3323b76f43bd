"""Random layers drop the same where ranks have the same samples, or parts of them; not where they have others, or say
so."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.api import declare_random_layer
from tests.trainer import mixtures, sequences
from tests.trainer.small import told
from tests.worlds import run_world

CASES: dict[str, Any] = {
    "tensor parallel": sequences.Case(tp=2, dropout=0.5),
    "data parallel": sequences.Case(dp=2, dropout=0.5),
    "context parallel": sequences.Case(2, dropout=0.5),
    "context parallel, declared": sequences.Case(2, dropout=0.5),
    "expert parallel": mixtures.Case(2, ep=2),
}


class Dropping(sequences.Trained):
    """Notes what its first block drops in the first step."""

    def pre_fit(self) -> None:
        self.dropped: list[Tensor] = []
        first = next(module for module in self.model.modules() if isinstance(module, nn.Dropout))
        first.register_forward_hook(self.note)

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if layer.training:  # and not in the verification of the first step
            self.dropped.append((output == 0).flatten()[:64])


class Declaring(Dropping):
    def configure_models(self) -> None:
        super().configure_models()
        assert self.world.mesh is not None
        for block in self.model.blocks:
            declare_random_layer(block.dropout, self.world.mesh["cp"], Shard(1))


class Drawing(mixtures.Trained):
    """Notes what its first step draws."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.dropped = [torch.rand(64) < 0.5]
        return super().training_step(batch, batch_idx)


def train() -> tuple[dict[str, Tensor], list[str]]:
    kinds: dict[str, Any] = {"expert parallel": Drawing, "context parallel, declared": Declaring}
    found = {}
    with told() as lines:
        for name, case in CASES.items():
            kind = kinds.get(name, Dropping)
            of = mixtures.config_of(case, training={"max_steps": 1}) if kind is Drawing else None
            config = of or sequences.config_of(case, max_steps=1, val_every_n_epochs=None)
            with kind(config) as trainer:
                trainer.fit()
                found[name] = trainer.dropped[0]
    return found, [line for line in lines if "declare_random_layer" in line]


def test_what_ranks_drop_is_equal_on_the_axes_of_split_layers_and_sequences_and_on_no_other() -> None:
    (here, said), (there, _) = run_world(train, 2)
    (message,) = said  # of tensor parallelism alone
    assert "dropout: apply_tensor_parallel does not say whether the tensor_parallel=2 ranks have" in message
    equal = {name: torch.equal(here[name], there[name]) for name in CASES}
    assert all(8 < int(dropped.sum()) < 56 for dropped in (*here.values(), *there.values()))
    assert equal == {name: name in ("tensor parallel", "context parallel") for name in CASES}
