import torch
import torch.nn as nn

from tests.api import trained_by


def test_a_losss_graph_tells_which_parameters_it_trains() -> None:
    used, other = nn.Linear(2, 2), nn.Linear(2, 2)
    hidden = used(torch.ones(1, 2))
    loss = (hidden * hidden.detach()).sum()
    assert trained_by(loss, [*other.parameters(), used.weight])
    assert not trained_by(loss, other.parameters())
    with torch.no_grad():
        assert not trained_by(used(torch.ones(1, 2)).sum(), used.parameters())
    used.bias.requires_grad_(False)
    assert not trained_by(loss, [used.bias])
    assert trained_by(used.weight.sum(), used.parameters())
