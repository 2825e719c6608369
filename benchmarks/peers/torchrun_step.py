"""A worker of torchrun: DDP over gloo with steps of STEP_MS, and a checkpoint every 10 steps. Prints a line for each step."""
import os
import time

import torch
import torch.distributed as dist

STEPS, STEP_S, FILE = int(os.environ["STEPS"]), int(os.environ["STEP_MS"]) / 1000, os.environ["FOLDER"] + "/checkpoint.pt"
torch.set_num_threads(1)
dist.init_process_group("gloo")
module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer, first = torch.optim.Adam(module.parameters(), lr=0.01), 0
if os.path.exists(FILE):
    state = torch.load(FILE)
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
model = torch.nn.parallel.DistributedDataParallel(module)
for step in range(first + 1, STEPS + 1):
    time.sleep(STEP_S)
    optimizer.zero_grad()
    x = torch.randn(4, 6)
    (model(x) - x.cumsum(1)[:, 2:5]).square().mean().backward()
    optimizer.step()
    os.write(1, f"step {dist.get_rank()} {step} {os.getpid()}\n".encode())  # in one piece: workers share a pipe
    if step % 10 == 0 and dist.get_rank() == 0:
        torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, FILE + ".part")
        os.replace(FILE + ".part", FILE)
