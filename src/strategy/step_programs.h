// Steps of a program's own loop that are compiled (lockstep/strategy/compiled.h).
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/strategy/compiled.h"
#include "ops/traced_program.h"

namespace lockstep {

class StrategyImpl;

// The programs of one step function. Key: the strategy's devices, the shapes and dtypes of the inputs, and StepKey.
class internal::StepPrograms {
 public:
  struct Entry {
    std::unique_ptr<ops::CompiledProgram> program;
    std::vector<bool> is_defined;                  // [result]: the program has the defined ones
    std::vector<std::weak_ptr<const void>> alive;  // the program cannot run without them
  };
  using Key = std::pair<const ops::ProgramDevices*, std::vector<std::int64_t>>;

  // Returns the key's entry. Drops the programs that cannot run any more.
  Entry& of(const Key& key);

 private:
  std::map<Key, Entry> entries_;
};

namespace strategy {

// Runs the step on all devices of the strategy, and returns [replica][result], undefined where the function's results
// were. One thread at a time. Throws InvalidArgument where replicas' inputs differ in shape.
std::vector<std::vector<Tensor>> run_program(StrategyImpl& strategy, const internal::StepToRun& step);

}  // namespace strategy
}  // namespace lockstep
