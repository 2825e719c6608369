// Batch normalization over the examples of all ranks. Follows torch.nn.SyncBatchNorm.
#pragma once

namespace torch::nn {
class Module;
}

namespace lockstep {

class Group;

// From now on every torch::nn::BatchNorm1d, 2d and 3d of the module normalizes, in training, by the mean and variance
// of the examples of all ranks; nothing is replaced, so members of the module's own keep working. Two all_reduces of 2
// * channels + 1 numbers a layer in forward and two in backward, on a group of their own. All ranks run the same layers
// in the same order, as often (so not within DistributedDataParallel::join); a gradient is that of the mean over all
// examples when DistributedDataParallel averages it. Collective. Throws InvalidArgument where a layer has neither
// weights nor running statistics. Follows SyncBatchNorm.convert_sync_batchnorm.
void convert_sync_batchnorm(torch::nn::Module& module, const Group& group);

}  // namespace lockstep
