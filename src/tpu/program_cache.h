// Compiled programs on disk, in the folder that the environment's LOCKSTEP_CACHE names.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pjrt/executable.h"

namespace lockstep::tpu {

// All that decides the compiler's result.
struct ProgramKey {
  std::string text;
  pjrt::CompileOptions options;
};

// The flags that the compilers of plugins take from the environment, in lines.
std::string compiler_flags();

// One thread at a time; processes of one user may share a folder. Each file has the whole key, which is compared.
class ProgramCache {
 public:
  // Makes the folder if need be. Throws InvalidArgument where others may write in it: their programs would run here.
  explicit ProgramCache(std::shared_ptr<const pjrt::Client> client);

  // The program, where it was stored by the same version of the plugin for devices of the same kind. A file that is
  // damaged, of another key, of another user, or that the plugin does not take, gives a warning, and nothing.
  std::optional<pjrt::Executable> find(const ProgramKey& key) const;

  // Warns where the program cannot be stored.
  void store(const ProgramKey& key, const pjrt::Executable& executable) const;

 private:
  std::string describe(const ProgramKey& key) const;
  std::string name_of(const std::string& description) const;

  const std::shared_ptr<const pjrt::Client> client_;
  const std::string folder_;  // empty: there is none
};

}  // namespace lockstep::tpu
