// A model's steps as compiled programs, for a strategy whose devices run programs (TPUStrategy).
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/data/dataset.h"
#include "ops/traced_program.h"
#include "tpu/programs/programs.h"
#include "train/execution.h"

namespace lockstep::programs {

// Agreement of all workers on the parts of a launch's batches: the workers run the same program.

// The sizes of an example's tensors, without the batch's: the same program serves all batches with the same ones.
using Shapes = std::vector<std::int64_t>;
Shapes shapes_of(const Example& batch);

// Returns x, y and weight, where the example has them.
std::vector<Tensor> defined_of(const Example& example);

struct LaunchAgreement {
  std::int64_t rows = 0;      // rows of the largest part
  Example row;                // one example, by which smaller parts are filled up
  std::vector<bool> updates;  // [step]: true where it changes variables
};

// name: what is launched ("the training step"), and all that must be the same on all workers. inputs: [replica of this
// worker][step]; parts without examples have shapes too. updates: [step], true where it updates by this worker's
// examples. Collective. Throws InvalidArgument on all workers where their launches or examples' shapes differ, or none
// has an example; Aborted, with that text, on a worker that another told faster. Throws InvalidArgument on this one
// alone where its own shapes differ.
LaunchAgreement agree_on_launch(const Communicator& workers, const std::string& name,
                                const std::vector<std::vector<Example>>& inputs, std::vector<bool> updates);

// Traces and compiles a program when its shapes come for the first time. Parts of a batch that are smaller than the
// first ones were are filled up with examples that do not count, so the same program serves them. For one model and its
// optimizer; one thread at a time. Collective over the strategy's workers.
class CompiledModel final : public train::Execution {
 public:
  CompiledModel(ModelImpl& impl, const Programs& programs) : Execution(impl), owner_(programs) {}

  std::shared_ptr<ReplicatedParameters> make_parameters(const Example& sample) override;
  bool reads_ahead() const override { return true; }
  std::unique_ptr<Prepared> prepare(std::vector<Parts>& batches) override { return launch(Kind::train, batches); }
  std::vector<PerReplica<train::StepResult>> train(std::vector<Parts>& batches, train::Tracker& tracker,
                                                   std::unique_ptr<Prepared> prepared,
                                                   const std::function<void()>& meanwhile) override;
  PerReplica<train::StepResult> evaluate(Parts& batch, train::Tracker& tracker) override;
  std::vector<Tensor> predict(Parts& batch) override;

  // The programs read the devices' values; the host averages buffers.
  void fetch_for_forward() const override;
  void forget_steps() override { programs_.clear(); }

 private:
  enum class Kind { train, evaluate, predict };

  using Input = std::vector<Example>;  // one replica's in one launch: [step]

  struct Compiled {
    std::int64_t rows = 0;  // rows of a replica's part
    std::vector<std::int64_t> output_sizes;
    std::unique_ptr<ops::CompiledProgram> program;
  };

  // The batches of a launch.
  struct Launch final : Prepared {
    Kind kind = Kind::train;
    std::vector<Input> inputs;  // [replica]
    std::shared_ptr<const Compiled> compiled;
    std::unique_ptr<ops::ProgramInputs> copied;
    std::vector<bool> updates;  // [step]
  };

  static std::string name_of(Kind kind);
  std::string described(Kind kind, const std::vector<Input>& inputs) const;
  std::vector<Input> read(std::vector<Parts>& batches) const;
  std::unique_ptr<Launch> launch(Kind kind, std::vector<Parts>& batches);
  std::shared_ptr<const Compiled> program_for(Kind kind, const std::vector<Input>& inputs, const LaunchAgreement& all);
  ops::ProgramDevices::Tensors trace(Kind kind, const Example& part, const Tensor& counts, Compiled& compiled) const;
  void check_labels(const Example& part, const Compiled& compiled) const;
  std::vector<std::vector<Tensor>> run(Launch& launch, const std::function<void()>& meanwhile = {}) const;
  std::vector<PerReplica<train::StepResult>> counted(const Launch& launch,
                                                     const std::vector<std::vector<Tensor>>& results,
                                                     train::Tracker& tracker) const;
  std::vector<std::vector<std::uint64_t>> seeds(Kind kind, int count) const;
  int steps(Kind kind, const std::vector<Input>& inputs) const;  // a launch's steps
  bool has_metrics() const;
  bool updates(const std::vector<Input>& inputs, std::size_t step) const;

  const Programs& owner_;    // the strategy's, which the model keeps
  std::int64_t number_ = 0;  // the model's, among the strategy's models that were built
  // [kind, steps of a launch, shapes]
  std::map<std::tuple<Kind, int, Shapes>, std::shared_ptr<const Compiled>> programs_;
};

}  // namespace lockstep::programs
