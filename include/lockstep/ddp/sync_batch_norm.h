// Batch normalization over the examples of all ranks. Follows torch.nn.SyncBatchNorm.
#pragma once

#include <torch/nn/modules/batchnorm.h>

namespace lockstep {

class Group;

// From now on every torch::nn::BatchNorm1d, 2d and 3d of the module normalizes, in training, by the mean and variance
// of the examples of all ranks. No layer is replaced, so members of the module's own keep working. A layer makes two
// all_reduces in forward and two in backward, of at most channels + 1 numbers each, on a group of their own. All ranks
// run the same layers in the same order, as often (so not within DistributedDataParallel::join). Gradients are those of
// the mean that DistributedDataParallel, fully_shard or Horovod's DistributedOptimizer makes of the ranks' losses. With
// none of them they are those of the mean over all examples; lockstep/parallel/pipeline.h tells those of a Pipeline.
// Not for modules of a Strategy, whose replicas may have no examples. Statistics of 16 bits are computed in float32.
// On GPUs the host waits only on a rank with at most one value per channel. A rank that does not know its examples in
// a backward throws, and aborts the layers' group. Collective; one thread a rank. Throws InvalidArgument where a layer
// has neither weights nor running statistics. Follows SyncBatchNorm.convert_sync_batchnorm.
//
// torch::nn::BatchNorm refuses a batch with one value per channel before it looks at other ranks; SyncBatchNorm, which
// is converted too, takes it.
void convert_sync_batchnorm(torch::nn::Module& module, const Group& group);

// Batch normalization of [examples, channels, ...], with the options, parameters and buffers of torch::nn::BatchNorm1d,
// 2d and 3d. Before convert_sync_batchnorm it normalizes by this rank's examples. Afterwards a rank may have one value
// per channel in training, or no example, as long as all ranks together have more than one. Forward throws
// InvalidArgument where they have not, and for a tensor of fewer than two dimensions. Follows torch.nn.SyncBatchNorm.
class SyncBatchNormImpl : public torch::nn::NormImplBase<1, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  using NormImplBase::NormImplBase;
  explicit SyncBatchNormImpl(std::int64_t channels) : SyncBatchNormImpl(torch::nn::BatchNormOptions(channels)) {}
  at::Tensor forward(const at::Tensor& x);

 protected:
  void _check_input_dim(const at::Tensor& x) override;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace lockstep
