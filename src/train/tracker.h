// The loss and metrics of an epoch, summed over steps and replicas.
#pragma once

#include <vector>

#include "lockstep/checkpoint.h"
#include "lockstep/logs.h"
#include "lockstep/model.h"

namespace lockstep {

// update is called by each replica's thread for itself; everything else while no replica runs.
class Tracker {
 public:
  Tracker(const CompileOptions& compiled, int replicas);

  // A replica's part of a batch.
  void update(int replica, const Example& part, const Tensor& outputs);

  // A batch's loss; the epoch's is the mean weighted by sizes.
  void add_loss(double loss, std::int64_t batch_size);

  void reset();
  Logs logs() const;

  void save(Archive& archive, const std::string& prefix) const;
  void load(const Archive& archive, const std::string& prefix);

 private:
  std::vector<double> merged_sums() const;

  std::vector<Metric> metrics_;
  std::size_t first_weighted_;                    // metrics_ from here on use sample weights
  std::vector<std::vector<MetricState>> states_;  // [replica][metric]
  double loss_sum_ = 0;
  double examples_ = 0;
};

}  // namespace lockstep
