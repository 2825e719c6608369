"""What PyTorch's DistributedDataParallel takes for the seed CNN, to compare with build/release/benchmarks/train_step.

    python3 -m venv .peers && .peers/bin/pip install torch==2.11.0 numpy
    OMP_NUM_THREADS=1 .peers/bin/torchrun --nproc-per-node 2 benchmarks/peers/pytorch_ddp.py
"""
import json
import time

import torch
from torch import nn

BATCH, STEPS = 64, 200

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(5408, 64), nn.ReLU(), nn.Linear(64, 10))
net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), fused=True)
cross_entropy = nn.CrossEntropyLoss()
images, labels = torch.rand(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))


def seconds_a_step(steps):
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


seconds_a_step(STEPS // 5)
best = min(seconds_a_step(STEPS) for _ in range(3))
replicas = torch.distributed.get_world_size()
if torch.distributed.get_rank() == 0:
    print(json.dumps({"peer": "pytorch-ddp-gloo", "replicas": replicas, "ms_per_step": 1e3 * best, "samples_per_s": BATCH * replicas / best}))
torch.distributed.destroy_process_group()
