"""A replica group of one process under torchft (gloo, a commit a step), with steps of STEP_MS. Prints a line for each step, made or dropped."""
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo

REPLICA, STEPS, STEP_S = os.environ["REPLICA"], int(os.environ["STEPS"]), int(os.environ["STEP_MS"]) / 1000
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
inner = torch.optim.Adam(module.parameters(), lr=0.01)


def load(state):
    module.load_state_dict(state["module"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1, load_state_dict=load, timeout=timedelta(seconds=30),
                  state_dict=lambda: {"module": module.state_dict(), "optimizer": inner.state_dict()}, rank=0, world_size=1,
                  store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1", replica_id=f"replica{REPLICA}_",
                  lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"])
optimizer = Optimizer(manager, inner)
while manager.current_step() < STEPS:
    before = manager.current_step()
    time.sleep(STEP_S)
    optimizer.zero_grad()
    x = torch.randn(4, 6)
    (module(x) - x.cumsum(1)[:, 2:5]).square().mean().backward()
    gradients = [p.grad for p in module.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))
    optimizer.step()
    print("step" if manager.current_step() > before else "dropped", REPLICA, manager.current_step(), manager.num_participants(), flush=True)
manager.shutdown(wait=False)
os._exit(0)
