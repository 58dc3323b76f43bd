"""The private set behind `is_persistent` has what `state_dict()` leaves out."""

import torch
import torch.nn as nn

from tests.api import is_persistent


def test_buffers_are_persistent_if_the_state_dict_has_them() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left", torch.zeros(1), persistent=False)
    module.register_buffer("changed", torch.zeros(1), persistent=False)
    module.register_buffer("changed", torch.zeros(1))
    module.left = torch.ones(1)
    own = [name for name, _ in module.named_buffers() if is_persistent(module, name)]
    assert own == list(module.state_dict()) == ["kept", "changed"]
