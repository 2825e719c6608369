"""Measures a training step with PyTorch; with --ddp under torchrun, one process a replica. `make bench-step` runs it.

    pytorch_step.py --model seed_cnn [--channels-last] [--batch 64] [--steps 200] [--device cuda [--graph] [--read-loss]]
    torchrun --nproc-per-node 2 pytorch_step.py --model seed_cnn --ddp
"""
import argparse
import json
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["seed_cnn", "mlp", "cifar_cnn", "transformer"], default="seed_cnn")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="batches come from host memory")
parser.add_argument("--graph", action="store_true", help="the step is captured as a CUDA graph")
parser.add_argument("--read-loss", action="store_true", help="each step ends by reading its loss, as train_on_batch does")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

TOKENS, VOCABULARY, WIDTH = 64, 1000, 256


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.output(self.blocks(self.tokens(x) + self.positions).mean(1))


def conv(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]


def make(name):
    if name == "transformer":
        return Transformer(), torch.randint(VOCABULARY, (args.batch, TOKENS))
    if name == "mlp":
        net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        return net, torch.rand(args.batch, 784)
    if name == "cifar_cnn":
        net = nn.Sequential(*conv(3, 32), *conv(32, 32), nn.MaxPool2d(2), *conv(32, 64), *conv(64, 64), nn.MaxPool2d(2),
                            nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10))
        return net, torch.rand(args.batch, 3, 32, 32)
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(5408, 64), nn.ReLU(), nn.Linear(64, 10))
    return net, torch.rand(args.batch, 1, 28, 28)


def memory_mib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("Pss:"))


torch.set_num_threads(1)
net, x = make(args.model)
if args.channels_last:
    net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
replicas, rank = 1, 0
if args.ddp:
    torch.distributed.init_process_group("gloo")
    replicas, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = nn.parallel.DistributedDataParallel(net)
y = torch.randint(0, 10, (args.batch,))
net = net.to(args.device)
optimizer = torch.optim.Adam(net.parameters(), fused=True, capturable=args.graph)
cross_entropy = nn.CrossEntropyLoss()


def compute(x, y):
    optimizer.zero_grad()
    loss = cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step():
    loss = compute(x.to(args.device), y.to(args.device))
    if args.read_loss:
        loss.item()


def captured():
    own_x, own_y = x.to(args.device), y.to(args.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compute(own_x, own_y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compute(own_x, own_y)

    def play():
        own_x.copy_(x)
        own_y.copy_(y)
        graph.replay()
        if args.read_loss:
            loss.item()

    return play


make_step = captured() if args.graph else step


def seconds_a_step(steps):
    start = time.perf_counter()
    for _ in range(steps):
        make_step()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


seconds_a_step(max(1, args.steps // 5))
best = min(seconds_a_step(args.steps) for _ in range(3))
memory = memory_mib()
if args.ddp:
    total = torch.tensor([memory])
    torch.distributed.all_reduce(total)
    memory = total.item()
if rank == 0:
    print(json.dumps({"ms_per_step": 1e3 * best, "samples_per_s": args.batch * replicas / best, "memory_mib": memory}))
if args.ddp:
    torch.distributed.barrier()  # or a process that is slower meets closed connections
    torch.distributed.destroy_process_group()
