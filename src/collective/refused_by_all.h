// A call that all ranks refuse together.
#pragma once

#include <functional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::collective {

// Thrown by all ranks of a Group in one call. So none waits for another one, and the Group can be used afterwards.
class RefusedByAll : public InvalidArgument {
 public:
  RefusedByAll(const Communicator& ranks, const std::string& what)
      : InvalidArgument(what), group_(ranks.group().shared_backend().get()) {}

  // True where these are the ranks. Some ranks of a larger Group may refuse a call that the others do not make.
  bool is_of(const Communicator& ranks) const { return ranks.group().shared_backend().get() == group_; }

 private:
  const void* group_;
};

// Calls check(), which communicates with nobody, on every rank. All ranks throw where one does. A rank whose check
// threw throws its own exception, an InvalidArgument as RefusedByAll; the others a RefusedByAll or Error with the text
// of the first. `member`: the word for a rank in the text, as in "worker 2". Collective: one sum.
void check_on_all(const Communicator& ranks, const std::string& member, const std::function<void()>& check);

}  // namespace lockstep::collective
