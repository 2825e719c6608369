// The programs that a step of a program's own loop became (lockstep/strategy/compiled.h).
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/strategy/compiled.h"
#include "ops/traced_program.h"

namespace lockstep {

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

}  // namespace lockstep
