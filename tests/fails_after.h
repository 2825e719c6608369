// For tests: a training that breaks off.
#pragma once

#include <lockstep/train/callback.h>

#include <stdexcept>

namespace lockstep {

// Fails when so many batches of an epoch have been trained on.
class FailsAfter : public Callback {
 public:
  explicit FailsAfter(std::int64_t batches) : batches_(batches) {}
  void on_train_batch_begin(std::int64_t batch) override {
    if (batch == batches_) throw std::runtime_error("stop here");
  }

 private:
  std::int64_t batches_;
};

}  // namespace lockstep
