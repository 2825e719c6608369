#include "lockstep/collective/communicator.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>

#include "base/mutex.h"
#include "base/text.h"
#include "collective/refused_by_all.h"

namespace lockstep {

namespace {

Buffer bytes_of(std::span<char> bytes) { return {bytes.data(), bytes.size(), DType::uint8}; }

double checked(double timeout_seconds) {
  if (timeout_seconds > 0) return timeout_seconds;
  throw InvalidArgument(text("Communicator: timeout_seconds is ", timeout_seconds, "; it must be above 0"));
}

}  // namespace

struct Communicator::State {
  State() = default;
  State(Group of, std::string called)
      : rank(of.rank()), size(of.size()), member(std::move(called)), group(std::move(of)) {}

  int rank = 0, size = 1;
  const std::string member = "rank";
  std::int64_t regroups = 0;
  Mutex mutex;
  std::optional<Group> group;  // of a process alone: made when it is asked for, under the mutex
};

Communicator::Communicator() : state_(std::make_shared<State>()) {}

Communicator::Communicator(Group group, double timeout_seconds, std::string member)
    : state_(std::make_shared<State>(std::move(group), std::move(member))),
      timeout_seconds_(checked(timeout_seconds)) {}

int Communicator::rank() const { return state_->rank; }
int Communicator::size() const { return state_->size; }
std::int64_t Communicator::regroups() const { return state_->regroups; }

const Group& Communicator::group() const {
  MutexLock lock(state_->mutex);
  if (!state_->group) state_->group = make_thread_groups(1)[0];
  return *state_->group;
}

Communicator Communicator::with_timeout(double seconds) const {
  auto other = *this;
  other.timeout_seconds_ = checked(seconds);
  return other;
}

Communicator Communicator::with_purpose(Purpose purpose) const {
  auto other = *this;
  other.purpose_ = purpose;
  return other;
}

Communicator Communicator::with_group(Group group) const {
  return Communicator(std::move(group), timeout_seconds_, state_->member).with_purpose(purpose_);
}

void Communicator::regroup(Group group) const {
  state_->rank = group.rank();
  state_->size = group.size();
  state_->group = std::move(group);
  ++state_->regroups;
}

void Communicator::run(Call call) const {
  call.purpose = purpose_;
  group().run(call, deadline());
}

void Communicator::sum(std::span<double> values) const {
  if (size() > 1) run(Call::all_reduce(buffer_of(values), ReduceOp::sum));
}

bool Communicator::any(bool holds) const {
  double count = holds ? 1 : 0;
  sum({&count, 1});
  return count > 0;
}

bool Communicator::all(bool holds) const { return !any(!holds); }

std::string Communicator::broadcast(const std::string& bytes, int root) const {
  if (size() == 1) return bytes;
  std::int64_t length = static_cast<std::int64_t>(bytes.size());
  run(Call::broadcast(buffer_of(std::span(&length, 1)), root));
  std::string result = rank() == root ? bytes : std::string(static_cast<std::size_t>(length), '\0');
  run(Call::broadcast(bytes_of(result), root));
  return result;
}

std::vector<std::string> Communicator::all_gather(const std::string& mine) const { return gather_at(mine, {}); }

std::vector<std::string> Communicator::gather(const std::string& mine, int root) const { return gather_at(mine, root); }

// On `root`, or on all.
std::vector<std::string> Communicator::gather_at(const std::string& mine, std::optional<int> root) const {
  if (size() == 1) return {mine};
  std::int64_t length = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(size()));
  run(Call::all_gather(buffer_of(std::span(&length, 1)), buffer_of(std::span(lengths))));
  const Counts counts(lengths.begin(), lengths.end());
  const bool gets = !root || *root == rank();
  std::string input = mine, output(gets ? std::accumulate(counts.begin(), counts.end(), std::size_t{0}) : 0, '\0');
  run(root ? Call::gather(bytes_of(input), bytes_of(output), *root, counts)
           : Call::all_gather(bytes_of(input), bytes_of(output), counts));
  std::vector<std::string> all;
  std::size_t at = 0;
  for (const auto count : counts) {
    if (gets) all.push_back(output.substr(at, count));
    at += count;
  }
  return all;
}

void Communicator::check_all_agree(const std::string& what, const std::string& mine) const {
  const auto all = with_purpose(Purpose(text("comparing ", what))).all_gather(mine);
  const auto other = std::find_if(all.begin(), all.end(), [&](const auto& theirs) { return theirs != all[0]; });
  if (other == all.end()) return;
  const auto [first, theirs] = first_difference(all[0], *other);
  const auto& member = state_->member;
  throw collective::RefusedByAll(*this, text("the ", member, "s' ", what, " differ: ", member, " 0 has ", first, ", ",
                                             member, " ", other - all.begin(), " has ", theirs));
}

void Communicator::abort(const std::string& reason) const {
  if (size() > 1) group().abort(text(state_->member, " ", rank(), ": ", reason));
}

void Communicator::throw_of_rank_0(const std::string& what, bool is_io_error) const {
  const auto whole = text(state_->member, " 0: ", what);
  if (is_io_error) throw IoError(whole);
  throw Error(whole);
}

}  // namespace lockstep

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
