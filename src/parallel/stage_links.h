// How the ranks of a pipeline send each other activations and gradients.
#pragma once

#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// A message is the output of a stage, or the gradient of its input, for a microbatch.
struct StageMessage {
  enum class Kind : std::int64_t { output, gradient };
  Kind kind = Kind::output;
  int stage = 0;
  int microbatch = 0;

  friend auto operator<=>(const StageMessage&, const StageMessage&) = default;
};

// One rank's ends. A Group of two for each direction between two ranks, so that neither waits for the other to receive.
class StageLinks {
 public:
  // Collective. `pairs`: the ranks {from, to} that send, the same on all ranks.
  StageLinks(const Communicator& ranks, const std::vector<std::pair<int, int>>& pairs);

  // Sends without waiting; `tensor` is not changed until flush.
  void send(int to, const StageMessage& message, const Tensor& tensor);

  // Waits for that message; others of the rank, which came before it, are kept.
  Tensor receive(int from, const StageMessage& message);

  // Waits until all that was sent has been received.
  void flush();

  void abort(const std::string& reason) const;

 private:
  struct Sent {
    Work work;
    std::shared_ptr<void> memory;
  };

  Tensor receive_next(const Communicator& link, StageMessage& message) const;

  const Communicator ranks_;
  std::deque<Sent> sent_;                  // before the Groups, which end the operations that use its memory
  std::map<int, Communicator> to_, from_;  // by rank
  std::map<std::pair<int, StageMessage>, Tensor> kept_;  // by sender
};

}  // namespace lockstep::parallel
