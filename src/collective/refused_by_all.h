// A call that all ranks refuse together.
#pragma once

#include <functional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::collective {

// All ranks of a Group throw it in the same call. So none waits for another one, and the Group can be used afterwards.
class RefusedByAll : public InvalidArgument {
 public:
  RefusedByAll(const Communicator& ranks, const std::string& what)
      : InvalidArgument(what), group_(ranks.group().shared_backend().get()) {}

  // True where these are the ranks. Some ranks of a larger Group may refuse a call that the others do not make.
  bool is_of(const Communicator& ranks) const { return ranks.group().shared_backend().get() == group_; }

 private:
  const void* group_;
};

// Calls check(), which communicates with nobody, on every rank. Where it throws on some ranks, all throw: these their
// own exception, InvalidArgument as RefusedByAll; the others RefusedByAll or Error with the text of the first of these.
// `member`: the word for a rank in that text, as in "worker 2". Collective: one sum where all are content.
void check_on_all(const Communicator& ranks, const std::string& member, const std::function<void()>& check);

}  // namespace lockstep::collective
