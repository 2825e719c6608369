// Finds values that the ranks of tensor parallelism should have alike, and do not: gradients of whole parameters, and
// inputs. Finds also gradients that should be of parts, and are alike.
#pragma once

#include <cstdint>
#include <string>

#include "base/mutex.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// Picks the calls of all ranks that are compared: the first, second, fourth, eighth and so on, counted anew after a
// regroup, since ranks may have come. None in a Rehearsal, whose other ranks give what this one does. Any thread.
class ComparedCalls {
 public:
  explicit ComparedCalls(const Communicator& ranks);
  bool next_is_one();

 private:
  const Communicator ranks_;
  const bool none_;
  Mutex mutex_;
  std::uint64_t calls_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::int64_t regroups_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // after which calls_ are counted
};

// Throws InvalidArgument on all ranks where their gradients differ by more than rounding. `whose`, for the message: "of
// up.weight". Collective.
void check_equal_gradients(const Tensor& gradient, const Communicator& ranks, const std::string& whose);

// From now on backwards compare the gradients of the parameter, which all ranks have whole. Only those that are
// ComparedCalls do so, which costs next to nothing.
void watch_gradients(const Tensor& parameter, const std::string& name, const Communicator& ranks);

// Looks now and then at inputs that a layer needs whole, the same on all ranks.
class WholeInputs {
 public:
  // `layer`: its name, for the message.
  WholeInputs(const std::string& layer, const Communicator& ranks);

  // Throws InvalidArgument, on all ranks, where this is one of the ComparedCalls and the inputs differ by more than
  // rounding. Collective; any thread.
  void check(const Tensor& input) const;

 private:
  const std::string layer_;
  const Communicator ranks_;
  mutable ComparedCalls calls_;
};

// Looks now and then at the gradients of what each rank is to use for its own part of the activations.
class PartialGradients {
 public:
  // `whose`: "of norm.weight"; `remedy`: what to do where the ranks do not have parts.
  PartialGradients(std::string whose, std::string remedy, const Communicator& ranks);

  // Returns `used`, which an operator uses with `input`. The backward of a use that is one of the ComparedCalls
  // compares its gradient, and the input where one is given. It throws InvalidArgument, on all ranks, where both are
  // the same everywhere and the gradient is not zero. Each rank has then used the value for the whole, and a sum would
  // count it often.
  Tensor watched(const Tensor& used, const Tensor& input = {}) const;

 private:
  const std::string whose_, remedy_;
  const Communicator ranks_;
  mutable ComparedCalls uses_;
};

}  // namespace lockstep::parallel
