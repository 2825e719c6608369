"""gloo's all_reduce of floats through PyTorch, under torchrun: one line of JSON."""
import json
import time

import torch
import torch.distributed as dist

def seconds(buffer, rounds):
    """Returns the seconds of one reduction."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(buffer)
    return (time.perf_counter() - start) / rounds


torch.set_num_threads(1)
dist.init_process_group("gloo")
microseconds = {}
for size in (4, 4096, 65536, 1388584, 16 << 20, 64 << 20):
    buffer = torch.ones(size // 4)
    seconds(buffer, 2)
    rounds = torch.tensor(min(max(int(0.5 / seconds(buffer, 3)), 5), 100_000))  # half a second, as ours
    dist.broadcast(rounds, 0)
    microseconds[size] = 1e6 * seconds(buffer, int(rounds))
if dist.get_rank() == 0:
    print(json.dumps({"us": microseconds}))
dist.barrier()  # or a process that is slower meets closed connections
dist.destroy_process_group()
