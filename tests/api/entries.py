"""One task by all entry points."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.api.starts import HEAD, assert_close
from uneven import TrainedState

EVERYTHING = (
    HEAD
    + """
import beside  # a module in the script's own folder

out, batch = Path(sys.argv[1]), int(sys.argv[2])
settings = {"batch_size": batch, "epochs": 2, "seed": 3, "progress": "off"}
state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), out=out / "run", **settings)

model = net()
ddp = Ddp.setup(model, sgd, dataset=TensorData(X, Y), **settings)
for epoch in range(2):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
loop = ddp.finish()

by_hand = net()
wrapped = Ddp.wrap(by_hand)
optimizer = sgd(by_hand.parameters())
for indices in torch.arange(150).split(40):
    mine = torch.tensor([i for i in indices.tolist() if i % wrapped.world_size == wrapped.rank])
    optimizer.zero_grad()
    loss_of(by_hand, (X[mine], Y[mine])).backward()
    wrapped.weighted_all_reduce_gradients(len(mine))
    optimizer.step()
wrapped.close()

rank = Ddp.rank()
loop_params = {name: value.cpu() for name, value in model.state_dict().items()}
trained = {"fit": state.params, "loop": loop_params, "hand": dict(by_hand.state_dict())}
torch.save(trained, out / f"r{rank}")
(out / f"r{rank}.json").write_text(json.dumps(
    {"name": __name__, "size": ddp.world_size, "config": state.config, "logs": len(loop.log),
     "finished": loop.finished}))
if len(sys.argv) > 3:
    state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), devices="cpu,cpu",
                **settings | {"batch_size": batch // 2})
    torch.save(state.params, out / "two")
"""
)


def assert_same_everywhere(out: Path, plain: dict[str, dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    ranks = [torch.load(out / f"r{rank}") for rank in range(2)]
    for kind, reference in ((kind, plain[kind]) for kind in ("fit", "loop", "hand")):
        assert_close(ranks[0][kind], reference)
        assert all(torch.equal(value, ranks[0][kind][name]) for name, value in ranks[1][kind].items())
    # Written once, by the first rank, with everybody's log in it.
    saved = TrainedState.load(out / "run")
    assert saved.finished
    assert_close(saved.params, plain["fit"])
    assert len(json.loads((out / "run" / "log.json").read_text())["ranks"]) == 2
    assert not (out / "run.1").exists()
    facts = [json.loads((out / f"r{rank}.json").read_text()) for rank in range(2)]
    for fact in facts:
        assert (fact["name"], fact["size"], fact["logs"], fact["finished"]) == ("__main__", 2, 2, True)
    return facts
