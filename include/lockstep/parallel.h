// Models larger than a device: everything of lockstep/parallel.
#pragma once

#include "lockstep/parallel/context_parallel.h"
#include "lockstep/parallel/cut_stages.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/gradients.h"
#include "lockstep/parallel/model_parallel_strategy.h"
#include "lockstep/parallel/moe.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/plan.h"
#include "lockstep/parallel/recompute.h"
#include "lockstep/parallel/split.h"
#include "lockstep/parallel/tensor_parallel.h"
