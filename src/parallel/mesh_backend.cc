#include "parallel/mesh_backend.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parallel {

namespace {

// Groups in which a lost rank is not learn of it by the reason for which they are aborted, which begins so.
constexpr std::string_view kLost = "lost rank of the mesh ";

constexpr std::chrono::milliseconds kBetweenLooks(100);  // for ranks that have gone
constexpr std::chrono::seconds kToFindOut(2);            // that one has

bool sooner(Deadline a, Deadline b) { return a.time() < b.time(); }

std::string reason_of_loss(int rank, const std::string& how) { return text(kLost, rank, ": ", how); }

}  // namespace

void MeshGroups::add(const std::shared_ptr<GroupBackend>& backend) {
  MutexLock lock(mutex_);
  std::erase_if(backends_, [](const auto& each) { return each.expired(); });
  backends_.push_back(backend);
}

void MeshGroups::fail_all(const std::string& reason) {
  std::vector<std::shared_ptr<GroupBackend>> alive;
  {
    MutexLock lock(mutex_);
    for (const auto& each : backends_) {
      if (auto backend = each.lock()) alive.push_back(std::move(backend));
    }
  }
  for (const auto& backend : alive) backend->fail(Failure::aborted(backend->rank(), reason));
}

MeshBackend::MeshBackend(const std::shared_ptr<GroupBackend>& inner, std::shared_ptr<MeshGroups> groups,
                         std::vector<int> mesh_ranks)
    : collective::Wrapper(inner), groups_(std::move(groups)), mesh_ranks_(std::move(mesh_ranks)) {
  groups_->add(inner);
}

template <class Act>
auto MeshBackend::translated(const std::vector<int>& mesh_ranks, const Act& act) const {
  try {
    return act();
  } catch (const PeerLost& lost) {
    raise_lost(mesh_ranks.at(static_cast<std::size_t>(lost.rank())), lost.how());
  } catch (const Aborted& aborted) {
    raise_if_lost(aborted.what());
    groups_->fail_all(aborted.what());
    throw;
  } catch (const DeadlineExceeded& late) {
    std::vector<int> ranks;
    std::vector<std::string> names;
    for (const int rank : late.ranks()) {
      ranks.push_back(mesh_ranks.at(static_cast<std::size_t>(rank)));
      names.push_back(text("rank ", ranks.back(), " is (", groups_->coordinates_of(ranks.back()), ")"));
    }
    const DeadlineExceeded in_mesh(late.operation(), late.waited_for(), ranks, names.empty() ? "" : "; " + join(names));
    groups_->fail_all(in_mesh.what());
    throw in_mesh;
  }
}

namespace {

// Members that find each other through a Group of the mesh, whose errors name ranks of the mesh already.
class MembersOfMesh final : public cluster::Bootstrap {
 public:
  explicit MembersOfMesh(cluster::Bootstrap& members) : members_(members) {}

  int rank() const override { return members_.rank(); }
  int size() const override { return members_.size(); }
  std::int64_t generation() const override { return members_.generation(); }
  int name_of(int rank) const override { return members_.name_of(rank); }
  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override {
    try {
      return members_.all_gather(mine, deadline);
    } catch (...) {
      failed_ = std::current_exception();
      throw;
    }
  }

  void rethrow_if_failed() const {
    if (failed_) std::rethrow_exception(failed_);
  }

 private:
  cluster::Bootstrap& members_;
  std::exception_ptr failed_;
};

}  // namespace

std::shared_ptr<GroupBackend> MeshBackend::make(cluster::Bootstrap& members, Deadline deadline) const {
  const auto mine = mesh_ranks_.at(static_cast<std::size_t>(rank()));
  if (groups_->elastic()) deadline = std::min(deadline, Deadline::after(groups_->elastic()->to_make), sooner);
  std::vector<int> ranks;
  for (const auto& each : members.all_gather(std::to_string(mine), deadline)) ranks.push_back(std::stoi(each));
  MembersOfMesh of_mesh(members);
  std::shared_ptr<GroupBackend> made;
  try {
    made = collective::Wrapper::make(of_mesh, deadline);
  } catch (const ClusterError& error) {  // such as a connection to a member that has gone
    if (!groups_->elastic()) throw;
    raise_failed_to_make(text("a Group of the mesh could not be made: ", error.what()));
  } catch (const std::exception&) {
    of_mesh.rethrow_if_failed();
    const auto error = std::current_exception();
    translated(ranks, [&]() -> int { std::rethrow_exception(error); });  // of the new Group
  }
  auto of_new = std::make_shared<MeshBackend>(std::move(made), groups_, std::move(ranks));
  // A rank that fails before this would never come to the new Group. A rank that fails here fails the new Group too.
  members.all_gather("made", deadline);
  return of_new;
}

// Names the ranks that have gone, so that an elastic job goes on.
void MeshBackend::raise_failed_to_make(const std::string& why) const {
  const auto& elastic = groups_->elastic();
  for (const auto until = Deadline::after(kToFindOut); !until.passed(); std::this_thread::sleep_for(kBetweenLooks)) {
    if (const auto gone = elastic->first_gone()) raise_lost(*gone, why);
  }
  groups_->fail_all(why);
  throw Aborted(why);
}

// Throws PeerLost where the message is a reason_of_loss.
void MeshBackend::raise_if_lost(const std::string& message) const {
  const auto begin = message.find(kLost);
  if (begin == std::string::npos) return;
  const auto number = begin + kLost.size(), end = message.find(": ", number);
  if (end == std::string::npos) return;
  const auto rank = whole_number<int>(std::string_view(message).substr(number, end - number));
  if (rank) raise_lost(*rank, message.substr(end + 2));
}

void MeshBackend::raise_lost(int mesh_rank, const std::string& how) const {
  groups_->fail_all(reason_of_loss(mesh_rank, how));
  throw PeerLost(mesh_rank, generation(), text("(", groups_->coordinates_of(mesh_rank), ") ", how));
}

void MeshBackend::fail(const Failure& failure) {
  inner().fail(failure);
  groups_->fail_all(failure.reason.data());
}

Communicator mesh_of(const Communicator& axis) {
  const auto backend = std::dynamic_pointer_cast<MeshBackend>(axis.group().shared_backend());
  const auto whole = backend != nullptr ? backend->groups()->whole() : nullptr;
  return whole != nullptr ? axis.with_group(axis.group().with_backend(whole)) : axis;
}

void check_on_all(const Communicator& ranks, const std::function<void()>& check) {
  std::string wrong;
  try {
    check();
  } catch (const InvalidArgument& error) {
    wrong = error.what();
  }
  for (const auto& theirs : ranks.all_gather(wrong)) {
    if (!theirs.empty()) throw InvalidArgument(theirs);
  }
}

bool are_of_one_mesh(const Group& a, const Group& b) {
  const auto first = std::dynamic_pointer_cast<MeshBackend>(a.shared_backend());
  const auto second = std::dynamic_pointer_cast<MeshBackend>(b.shared_backend());
  return first != nullptr && second != nullptr && first->groups() == second->groups();
}

const char* MeshBackend::run(const Call& call, Deadline deadline) {
  return translated(mesh_ranks_, [&] { return inner().run(call, deadline); });
}

const char* MeshBackend::exchange(std::span<const Call> calls, Deadline deadline) {
  return translated(mesh_ranks_, [&] { return inner().exchange(calls, deadline); });
}

EnqueuedCalls MeshBackend::enqueue(std::span<const Call> calls, Deadline deadline) {
  return translated(mesh_ranks_, [&] {
    auto enqueued = inner().enqueue(calls, deadline);
    enqueued.join = [this, join = std::move(enqueued.join)] { translated(mesh_ranks_, join); };
    return enqueued;
  });
}

bool MeshBackend::reaches(MemoryDevice device, Deadline deadline) {
  return translated(mesh_ranks_, [&] { return inner().reaches(device, deadline); });
}

void MeshBackend::look(const char* operation, bool also_left) {
  translated(mesh_ranks_, [&] { inner().look(operation, also_left); });
}

void MeshBackend::begin_split(int color, int key, Deadline deadline) {
  translated(mesh_ranks_, [&] { inner().begin_split(color, key, deadline); });
}

void MeshBackend::synchronize(Deadline deadline) {
  translated(mesh_ranks_, [&] { inner().synchronize(deadline); });
}

class Rehearsal::Backend final : public GroupBackend {
 public:
  Backend(int ranks, int rank) : ranks_(ranks), rank_(rank) {}

  const char* name() const override { return "rehearsal"; }
  int rank() const override { return rank_; }
  int size() const override { return ranks_; }
  std::int64_t generation() const override { return 0; }

  const char* run(const Call& call, Deadline /*deadline*/) override {
    counted_.push_back({call.kind, static_cast<double>(std::max(call.input.bytes(), call.output.bytes()))});
    const auto* const from = static_cast<const std::byte*>(call.input.data);
    auto* const to = static_cast<std::byte*>(call.output.data);
    // An output with parts of several ranks has the input in each. Of an input with such parts it is the first.
    for (std::size_t at = 0; from != nullptr && at < call.output.bytes(); at += call.input.bytes()) {
      if (call.input.bytes() == 0) break;
      if (to + at != from) std::memmove(to + at, from, std::min(call.input.bytes(), call.output.bytes() - at));
    }
    return name();
  }

  const char* exchange(std::span<const Call> /*calls*/, Deadline /*deadline*/) override {
    throw Error("rehearsal: messages between two ranks are not rehearsed");
  }
  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline /*deadline*/) const override {
    return std::make_shared<Backend>(members.size(), members.rank());
  }
  Memory allocate(std::size_t bytes) override { return collective::private_memory(bytes); }
  void look(const char* /*operation*/, bool /*also_left*/) override {}
  void fail(const Failure& /*failure*/) override {}

  std::vector<Counted> take() { return std::exchange(counted_, {}); }

 private:
  const int ranks_, rank_;
  std::vector<Counted> counted_;
};

Rehearsal::Rehearsal(int ranks, int rank) : backend_(std::make_shared<Backend>(ranks, rank)), ranks_(Group(backend_)) {}

bool Rehearsal::runs_on(const Communicator& ranks) {
  return dynamic_cast<const Backend*>(ranks.group().shared_backend().get()) != nullptr;
}

std::vector<Rehearsal::Counted> Rehearsal::take() { return backend_->take(); }

}  // namespace lockstep::parallel
