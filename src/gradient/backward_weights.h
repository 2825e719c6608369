// The weight of a backward: the number of examples of the forwards whose operators are in its graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::gradient {

// True where the backward that runs adds to the leaf's gradient: torch::autograd::grad does not.
bool accumulates(const at::Tensor& leaf);

// Autograd numbers the nodes of a thread in the order in which they are made, so a forward's nodes are those between
// two numbers. Used by one thread: that of the forwards and backwards.
class BackwardWeights {
 public:
  // How a backward gets its weight. `add` tells a number in each case.
  enum class Weight {
    as_told,         // the number that was told; 1 where none was
    as_told_always,  // as as_told; but once a number was told, a backward without one is refused
    by_forwards,     // the examples of the backward's forwards, and the number that was told; neither: refused
  };
  struct Options {
    std::string caller;  // for messages: "DistributedDataParallel"
    std::string object;  // and "ddp", as a user would call it
    Weight weight = Weight::as_told;

    // Called in a backward that reaches other parameters than the last ones did.
    std::function<void()> on_other_parameters = {};
  };
  explicit BackwardWeights(Options options) : options_(std::move(options)) {}
  ~BackwardWeights();
  BackwardWeights(const BackwardWeights&) = delete;
  BackwardWeights& operator=(const BackwardWeights&) = delete;

  // Backwards that reach these leaves of autograd's graph have this object's weights.
  void add_parameters(const std::vector<at::Tensor>& parameters);

  // The weight of the backward that runs, for a layer that computes with other ranks in the backward. It is the weight
  // of the object that has the layer's own `parameter`. Where no object has `parameter`, the oldest object that has
  // parameters in the graph counts. Empty where the backward adds to the gradient of no object's parameter.
  static std::optional<double> of_layer(const at::Tensor& parameter);

  // Made in a backward that computes gradients for these parameters. While an Inside lives, a backward within the outer
  // backward has the outer one's weight. Where that weight is not known, `of_layer` throws why.
  class Inside {
   public:
    explicit Inside(const std::vector<at::Tensor>& parameters);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    friend class BackwardWeights;
    const Inside* const outer_;
    std::optional<double> weight_;
    std::exception_ptr unknown_;
  };

  // From now on a backward has the weight `by_forwards`.
  void expect_forwards() { options_.weight = Weight::by_forwards; }

  // The number of the next node.
  static std::uint64_t next_node();

  // A forward made the nodes [begin, now). `examples`: how many its inputs have; empty where they do not tell.
  void add_forward(std::uint64_t begin, std::optional<double> examples);

  // Adds to the examples of the next backward those of forwards that nobody records.
  void add(double examples) { told_ = told_.value_or(0) + examples; }

  // Returns the weight of the backward that runs, also when called again in that backward. Throws InvalidArgument where
  // the backward is refused.
  double of_this_backward();

 private:
  static std::uint64_t next_number();
  static BackwardWeights* first_in_graph();
  double find_weight(int backward);

  struct Forward {
    std::uint64_t begin = 0, end = 0;  // numbers of nodes
    std::optional<double> examples;
    int backward = -1;  // autograd's number of the last one that this forward was found in
  };
  struct Found {
    bool any = false, unknown = false;
    double examples = 0;
    std::uint64_t newest = 0;      // node
    std::uint64_t parameters = 0;  // a hash of those that the graph reaches
  };

  Forward* forward_of(std::uint64_t node);
  Found look_through(int backward);
  bool are_other_parameters(std::uint64_t hash);

  Options options_;
  const std::uint64_t number_ = next_number();  // in the order of construction
  std::vector<at::Tensor> registered_;
  int backward_ = -1;             // autograd's number of the last one
  double weight_ = 1;             // and its weight
  std::deque<Forward> forwards_;  // by ascending numbers
  std::optional<double> told_;
  std::optional<double> last_told_;       // what `add` told, and a backward used
  std::uint64_t told_newest_ = 0;         // the newest node of that backward's graph
  std::uint64_t told_until_ = 0;          // the node that came next then
  std::deque<std::uint64_t> parameters_;  // hashes of what the last backwards reached
};

}  // namespace lockstep::gradient
