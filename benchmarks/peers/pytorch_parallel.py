"""A step of a transformer that PyTorch splits over processes of one thread, over gloo: tensor parallel, FSDP2, and each
schedule of torch.distributed.pipelining. AdamW (fused). Prints a line of JSON.

    .peers/pytorch/bin/python benchmarks/peers/pytorch_parallel.py --mode tensor --ranks 2
"""
import argparse
import json
import os
import tempfile
import time

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn import functional as F  # noqa: E402

SCHEDULES = {"gpipe": (pipelining.ScheduleGPipe, 1), "1f1b": (pipelining.Schedule1F1B, 1),
             "interleaved": (pipelining.ScheduleInterleaved1F1B, 2), "looped-bfs": (pipelining.ScheduleLoopedBFS, 2),
             "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, 2), "zbv": (ScheduleZBVZeroBubble, 2),
             "dualpipev": (ScheduleDualPipeV, 2)}


class Front(nn.Module):
    def __init__(self, width, sequence):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Parameter(0.02 * torch.randn(sequence, width))

    def forward(self, x):
        return self.token(x) + self.place


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)  # qkv ordered by head
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, 32)).permute(3, 0, 2, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_model(options):
    torch.manual_seed(0)
    blocks = [Block(options.width) for _ in range(options.layers)]
    return nn.Sequential(Front(options.width, options.sequence), *blocks, nn.LayerNorm(options.width), nn.Linear(options.width, 256))


def cross_entropy(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_step(rank, options, x, target):
    """A function that makes forward and backward, and the parameters of this rank."""
    model = make_model(options)
    if options.mode == "pipeline":
        return make_pipeline(model, rank, options, x, target)
    if options.mode == "tensor":
        styles = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model[1:-2]:
            parallelize_module(block, init_device_mesh("cpu", (options.ranks,)), styles)
    if options.mode == "shard":
        mesh = init_device_mesh("cpu", (options.ranks,))
        for block in model[1:-2]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return lambda: cross_entropy(model(x), target).backward(), list(model.parameters())


def make_pipeline(model, rank, options, x, target):
    schedule, chunks = SCHEDULES[options.schedule]
    ranks, count = options.ranks, options.ranks * chunks
    cuts = [0, *(1 + options.layers * i // count for i in range(1, count)), len(model)]
    v_shaped = options.schedule in ("zbv", "dualpipev")
    mine = [rank, count - 1 - rank] if v_shaped else [rank + ranks * i for i in range(chunks)]
    parts = [model[cuts[i]:cuts[i + 1]] for i in mine]
    stages = [pipelining.PipelineStage(part, i, count, torch.device("cpu")) for part, i in zip(parts, mine)]
    if v_shaped:  # their warm-up sends to its own rank, which gloo refuses
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = lambda: []
    runner = schedule(stages if chunks > 1 else stages[0], n_microbatches=options.microbatches, loss_fn=cross_entropy)
    inputs, targets = [x] if 0 in mine else [], {"target": target} if count - 1 in mine else {}
    return lambda: runner.step(*inputs, **targets), [p for part in parts for p in part.parameters()]


def work(rank, options, file, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=options.ranks)
    ids = torch.randint(0, 256, (options.batch, options.sequence + 1), generator=torch.Generator().manual_seed(1))
    step, parameters = make_step(rank, options, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    split = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    adamw = torch.optim.AdamW([{"params": group} for group in (split, whole) if group], lr=1e-3, fused=True)

    def window():
        dist.barrier()
        start = time.time()
        for _ in range(options.steps):
            adamw.zero_grad()
            step()
            adamw.step()
        return (time.time() - start) / options.steps

    window()
    seconds = min(window() for _ in range(4))
    everyone = [None] * options.ranks
    dist.all_gather_object(everyone, seconds)
    if rank == 0:
        data = options.ranks if options.mode == "shard" else 1
        queue.put({"ms_per_step": 1e3 * max(everyone), "samples_per_s": data * options.batch / max(everyone)})
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("one", "tensor", "shard", "pipeline"), default="one")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    for name, value in (("ranks", 2), ("layers", 4), ("width", 256), ("sequence", 64), ("batch", 8), ("microbatches", 8), ("steps", 15)):
        parser.add_argument("--" + name, type=int, default=value)
    options = parser.parse_args()
    if options.mode == "one":
        options.ranks = 1
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        group = mp.start_processes(work, (options, folder + "/store", queue), nprocs=options.ranks, join=False, start_method="spawn")
        end = time.time() + 240
        while not group.join(1):
            if time.time() > end:
                for process in group.processes:
                    process.kill()
                raise SystemExit("no result in 240 s")
        print(json.dumps(queue.get()))
