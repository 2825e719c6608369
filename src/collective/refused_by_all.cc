#include "collective/refused_by_all.h"

#include <algorithm>
#include <exception>

#include "base/text.h"

namespace lockstep::collective {

void check_on_all(const Communicator& ranks, const std::string& member, const std::function<void()>& check) {
  static const Purpose kAsking("asking whether a rank refuses the call");
  constexpr char kInvalid = 'i', kOther = 'o';
  std::exception_ptr mine;
  std::string said;  // its kind, and its text
  try {
    check();
  } catch (const InvalidArgument& error) {
    mine = std::make_exception_ptr(RefusedByAll(ranks, error.what()));
    said = kInvalid + std::string(error.what());
  } catch (const std::exception& error) {
    mine = std::current_exception();
    said = kOther + std::string(error.what());
  }
  const auto asking = ranks.with_purpose(kAsking);
  if (!asking.any(mine != nullptr)) return;
  const auto all = asking.all_gather(said);
  if (mine) std::rethrow_exception(mine);
  const auto first = std::find_if(all.begin(), all.end(), [](const auto& theirs) { return !theirs.empty(); });
  const auto what = text(member, " ", first - all.begin(), ": ", first->substr(1));
  if (first->front() == kInvalid) throw RefusedByAll(ranks, what);
  throw Error(what);
}

}  // namespace lockstep::collective
