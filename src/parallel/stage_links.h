// How the ranks of a pipeline send each other activations and gradients.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
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
//
// Each tensor follows a header, which goes through host memory. Where all ranks' tensors are on GPUs that their Groups
// reach, tensors have a second Group of two for each direction. A send then waits in a stream of its own, and holds
// back neither the next operators nor what comes from the other side. A receiver enqueues its part when the header is
// there, so a message that was not sent holds back nothing. Else tensors go through host memory, by the Groups of
// headers.
class StageLinks {
 public:
  // Collective. `pairs`: the ranks {from, to} that send, the same on all ranks.
  StageLinks(const Communicator& ranks, const std::vector<std::pair<int, int>>& pairs);

  // Collective. From now on this rank's tensors are on `device`, which is a GPU on all ranks or on none.
  void use(at::Device device);

  // Sends without waiting; `tensor` is not changed until flush.
  void send(int to, const StageMessage& message, const Tensor& tensor);

  // Waits for that message; others of the rank, which came before it, are kept. The result is on the device that `use`
  // named, or on the CPU. There the current stream waits in the place of the host.
  Tensor receive(int from, const StageMessage& message);

  // Waits, or has the current stream wait, until all that was sent has been received.
  void flush();

  void abort(const std::string& reason) const;

 private:
  struct Sent {
    Work work;
    std::shared_ptr<void> memory;
  };

  struct Link {
    Communicator headers;
    std::optional<Communicator> tensors = {};  // from GPU to GPU
  };

  Link& link_of(const std::pair<int, int>& pair);
  void connect(at::Device device);
  const Communicator& tensors_of(const Link& link) const { return device_.is_cpu() ? link.headers : *link.tensors; }
  Tensor receive_next(const Link& link, StageMessage& message) const;

  const Communicator ranks_;
  std::vector<std::pair<int, int>> own_pairs_;  // in the order of `pairs`
  at::Device device_ = at::kCPU;                // where tensors are sent from, and received
  std::optional<bool> reach_gpus_;              // whether all links go from GPU to GPU; not known before the first use
  std::deque<Sent> sent_;                       // before the Groups, which end the operations that use its memory
  std::map<int, Link> to_, from_;               // by rank
  std::map<std::pair<int, StageMessage>, Tensor> kept_;  // by sender
};

}  // namespace lockstep::parallel
