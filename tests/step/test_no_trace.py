import copy

import torch
from torch import nn

from tests.step.nets import CPU, batches, mean_loss
from uneven.step.eager import EagerStep
from uneven.step.no_trace import no_trace
from uneven.step.precision import Precision


def test_warm_up_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = EagerStep(model, optimizer, mean_loss, Precision("fp32", CPU))
    for _ in range(2):
        step(batches([8]), 8)
    model_before = copy.deepcopy(model.state_dict())
    optimizer_before = copy.deepcopy(optimizer.state_dict())
    totals, random = step.meter.totals.clone(), torch.get_rng_state()
    with no_trace(step, CPU):
        for _ in range(3):
            step(batches([8]), 8)
        assert not torch.equal(model.state_dict()["0.weight"], model_before["0.weight"])
    assert all(torch.equal(value, model_before[name]) for name, value in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    for place, state in optimizer_before["state"].items():
        assert all(torch.equal(after[place][key], value) for key, value in state.items())
    assert torch.equal(step.meter.totals, totals)
    assert torch.equal(torch.get_rng_state(), random)
