"""gloo's all_reduce of floats through PyTorch, under torchrun: one line of JSON."""
import json
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
microseconds = {}
for size in (4, 4096, 65536, 1388584, 16 << 20, 64 << 20):
    buffer = torch.ones(size // 4)
    rounds = 200 if size < 1 << 20 else 20
    dist.all_reduce(buffer)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(buffer)
    microseconds[size] = 1e6 * (time.perf_counter() - start) / rounds
if dist.get_rank() == 0:
    print(json.dumps({"us": microseconds}))
dist.barrier()  # or a process that is slower meets closed connections
dist.destroy_process_group()
