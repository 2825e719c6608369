#include "lockstep/base/error.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>

#include "base/text.h"

namespace lockstep {

namespace {

// Returns nothing where `detail` names them.
std::string waited_for_whom(const std::vector<int>& ranks, const std::string& detail) {
  if (ranks.empty()) return detail.empty() ? ": another rank has not come" : "";
  return text(ranks.size() == 1 ? ": rank " : ": ranks ", join(ranks), ranks.size() == 1 ? " has" : " have",
              " not come");
}

std::terminate_handler usual_handler = nullptr;

[[noreturn]] void end_with(const Error& error, int status) {
  std::cerr << text("lockstep: ", error.what(), "\n");     // in one piece, for several ranks may write at once
  if (ftrylockfile(stdout) == 0) fflush_unlocked(stdout);  // another thread may hold it for ever
  std::_Exit(status);
}

// A program that does not catch an Error ends with its text and a status, as one that does, and without a core dump.
// Other exceptions are left to the handler that was there.
void end_uncaught() {
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const Interrupted& error) {
    end_with(error, 128 + error.signal());  // as a shell has it
  } catch (const Error& error) {
    end_with(error, 1);
  } catch (...) {
  }
  if (usual_handler != nullptr) usual_handler();
  std::abort();
}

const bool is_installed = [] {
  usual_handler = std::set_terminate(end_uncaught);
  return true;
}();

}  // namespace

DeadlineExceeded::DeadlineExceeded(const std::string& operation, std::chrono::duration<double> waited_for,
                                   std::vector<int> ranks, const std::string& detail)
    : Error(text(operation, ": gave up after ", waited_for.count(), " s", waited_for_whom(ranks, detail), detail)),
      operation_(operation),
      waited_for_(waited_for),
      ranks_(std::move(ranks)) {}

PeerLost::PeerLost(int rank, std::int64_t generation, const std::string& how)
    : Error(text("lost rank ", rank, " of generation ", generation, ": ", how)),
      rank_(rank),
      generation_(generation),
      how_(how) {}

Interrupted::Interrupted(int signal)
    : Error(text("training was interrupted by ", strsignal(signal), " after a whole step")), signal_(signal) {}

}  // namespace lockstep
