// For a LibTorch loop of your own over several processes: DistributedDataParallel, DiLoCo, ShardedOptimizer, the Job
// that a launcher started, and reductions of tensors. For SyncBatchNorm include lockstep/ddp/sync_batch_norm.h as well.
#pragma once

#include "lockstep/ddp/diloco.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/sharded_optimizer.h"
#include "lockstep/elastic/job.h"
#include "lockstep/gradient/tensor_collectives.h"
