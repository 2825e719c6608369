// Reduces the gradients of a process's backward over the ranks, for training loops of the user's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gradient/backward_weights.h"
#include "gradient/buckets.h"
#include "gradient/gradient_hooks.h"

namespace lockstep::gradient {

struct GradientReducerOptions {
  BucketOptions buckets;
  bool sum = false;               // gradients become (sum over ranks of weight * gradient) instead
  bool zeros_for_unused = false;  // a parameter without a gradient on any rank gets zeros
  BackwardWeights::Options weights = {};
};

// A pass is one backward with sync on, together with the earlier ones without sync whose gradients have accumulated.
// All ranks make the same passes; in each, a parameter may lack a gradient on some ranks or on all. After a pass, the
// gradient of every parameter that has one on any rank is
//   backwards * (sum over ranks and backwards of weight * gradient) / (sum over ranks and backwards of weight),
// where `backwards` is this rank's own count: every example counts the same, whichever backward it was in. The gradient
// has the same bits on all ranks, and is a view of a bucket: the next pass overwrites what the caller has not copied.
//
// One thread: the one that calls backward. Backward throws what the Communicator throws.
class GradientReducer {
 public:
  // Tensors require gradients; names are for messages. All ranks take equal parameters.
  GradientReducer(const std::vector<std::string>& names, std::vector<at::Tensor> parameters, Communicator ranks,
                  const GradientReducerOptions& options);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Off: backward only accumulates (no_sync).
  void set_sync(bool on) { sync_ = on; }
  bool sync() const { return sync_; }

  // The weights of this rank's backwards, by their numbers of examples.
  BackwardWeights& weights() { return weights_; }

  // The name of its buckets, as Buckets::name.
  const std::string& name() const { return buckets_.name(); }

  // Called before each forward. Returns whether the communicator has a new Group; then the next pass is the first.
  // Throws Error where the last pass failed midway and the Group is the same: the ranks are out of step. Throws
  // InvalidArgument where a later reducer has taken the gradients of a parameter.
  bool prepare();

  // Called before every pass of this rank's. Where it returns false, backward only accumulates, as with sync off.
  void set_before_pass(std::function<bool()> ask) { before_pass_ = std::move(ask); }

  // Called at the end of every pass with the lowest rank that had data in it.
  void set_after_pass(std::function<void(int root)> act) { after_pass_ = std::move(act); }

  // Makes a pass without a backward, from the accumulated gradients.
  void reduce_accumulated();

  // Takes part in the other ranks' next pass without gradients and with weight 0. With `wants_gradients` the parameters
  // get the pass's means. Returns the lowest rank that had data in it, or nothing when no rank has any.
  std::optional<int> shadow_pass(bool wants_gradients = false);

  // Parameters in the order in which rank 0's first backward made their gradients.
  const std::vector<std::int64_t>& order() const { return buckets_.order(); }

 private:
  void require_gradients() const;
  void make_views();
  at::Tensor weighed(std::size_t parameter, const at::Tensor& gradient);
  void begin_backward();
  bool are_cleared() const;
  bool only_accumulates();
  void keep_sums();
  void on_gradient(std::size_t parameter);
  void begin_pass();
  void take(std::size_t parameter);
  void finish_pass();
  void finish_reductions();
  void write_back();

  // Constant after construction.
  const std::vector<std::string> names_;
  const std::vector<at::Tensor> parameters_;
  std::vector<std::size_t> distinct_;  // parameters; of a tied one, which has several names, the last
  const bool sum_, zeros_for_unused_;
  std::vector<unsigned> before_accumulation_;  // [parameter]: hooks on each new gradient

  Buckets buckets_;
  std::vector<at::Tensor> inputs_, means_;  // [parameter]: its part of the bucket, in the parameter's shape
  int layout_ = 0;                          // of the buckets, when these were made
  std::function<bool()> before_pass_;
  std::function<void(int)> after_pass_;
  bool sync_ = true;
  BackwardWeights weights_;
  double weight_ = 1;  // of the backward that runs, or ran last

  // The backwards since the last pass. An accumulated gradient is the sum of gradient * weight / unit.
  struct Accumulated {
    int backwards = 0;
    double weight = 0;
    double unit = 0;
    std::size_t last = 0;                       // the parameter whose gradient they were the last to write
    const c10::TensorImpl* gradient = nullptr;  // only compared
    std::uint32_t version = 0;                  // autograd's, of that gradient then
  };
  Accumulated accumulated_;
  // Used with `sum`, [parameter]: the gradient that the last pass left, and a copy of it while backwards accumulate.
  std::vector<at::Tensor> summed_, kept_;
  int backward_ = -1;  // autograd's number of the last one

  // The current pass:
  bool open_ = false;
  bool has_data_ = false;  // this rank
  bool wants_gradients_ = false;
  double scale_ = 0;       // the running weight scale
  int accumulating_ = -1;  // the backward for which before_pass_ returned false

  std::vector<PostAccumulateHook> after_accumulation_;  // last: removed before what they use
};

}  // namespace lockstep::gradient
