#include "collective/mpi/mpi_communicator.h"

#include <atomic>
#include <memory>
#include <sstream>

#include "base/text.h"
#include "collective/mpi/process.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::mpi {
namespace {

// MPI tells groups that are made at the same time from each other by a tag. The first member chooses it.
constexpr int kTags = 1 << 14;

// A member tells the others its MPI rank and the tag, or why it has none.
struct Member {
  int rank = -1, tag = 0;
  std::string problem;

  std::string words() const { return text(rank, " ", tag, " ", problem); }
  static Member of(const std::string& words) {
    std::istringstream in(words);
    Member member;
    in >> member.rank >> member.tag;
    in.get();
    std::getline(in, member.problem, '\0');
    return member;
  }
};

Member this_member(const std::function<void()>& check, Deadline deadline) {
  static std::atomic<int> groups{0};
  try {
    const int rank = start(check, deadline);
    return {.rank = rank, .tag = groups++ % kTags, .problem = {}};
  } catch (const InvalidArgument& error) {
    return {.problem = error.what()};
  }
}

void require_apart(const std::vector<int>& ranks) {
  for (std::size_t b = 0; b < ranks.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (ranks[a] != ranks[b]) continue;
      throw InvalidArgument(text("the backend \"mpi\": ranks ", a, " and ", b, " are both MPI's rank ", ranks[a],
                                 "; ranks must be processes that one mpirun has started"));
    }
  }
}

Handle create(const std::vector<int>& ranks, int tag) {
  const auto& mpi = library();
  Handle world = 0, members = 0, made = 0;
  require(mpi.MPI_Comm_group(mpi.constants.world, &world), "MPI_Comm_group");
  require(mpi.MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &members), "MPI_Group_incl");
  require(mpi.MPI_Comm_create_group(mpi.constants.world, members, tag, &made), "MPI_Comm_create_group");
  require(mpi.MPI_Comm_set_errhandler(made, mpi.constants.errors_return), "MPI_Comm_set_errhandler");
  mpi.MPI_Group_free(&members);
  mpi.MPI_Group_free(&world);
  return made;
}

}  // namespace

std::string problem() {
  try {
    library();
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

MpiCommunicator::MpiCommunicator(cluster::Bootstrap& members, const std::function<void()>& check, Deadline deadline) {
  std::vector<int> ranks;
  int tag = 0;
  for (const auto& words : members.all_gather(this_member(check, deadline).words(), deadline)) {
    const auto member = Member::of(words);
    if (!member.problem.empty()) throw InvalidArgument(text("rank ", ranks.size(), ": ", member.problem));
    if (ranks.empty()) tag = member.tag;
    ranks.push_back(member.rank);
  }
  require_apart(ranks);
  const auto made = std::make_shared<Handle>(0);
  run_bounded(
      "MPI_Comm_create_group", [=] { *made = create(ranks, tag); }, check, deadline);
  handle_ = *made;
}

// MPI_Comm_free does not wait for the other ranks.
MpiCommunicator::~MpiCommunicator() {
  if (!failed_ && !has_ended()) library().MPI_Comm_free(&handle_);
}

void MpiCommunicator::mark_failed() {
  failed_ = true;
  mpi::mark_failed();
}

}  // namespace lockstep::collective::mpi
