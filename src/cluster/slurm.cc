#include "cluster/resolvers.h"

#include <charconv>
#include <optional>
#include <string_view>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {

namespace {

constexpr std::size_t kMostNodes = 100'000, kLongestName = 255;  // Slurm allows 65,533 nodes, DNS names of 255 bytes

class Parser {
 public:
  Parser(std::string_view list, const std::string& variable) : list_(list), variable_(variable) {}

  // A list is names separated by commas outside of brackets.
  std::vector<std::string> nodes() {
    std::vector<std::string> all;
    do {
      for (auto& name : names()) add(all, std::move(name));
    } while (accept(','));
    if (at_ < list_.size()) fail(text("'", list_[at_], "' is not expected"));
    return all;
  }

  std::vector<int> counts() {
    std::vector<int> all;
    do {
      const int count = static_cast<int>(number(digits()));
      int times = 1;
      if (accept('(')) {
        if (!accept('x')) fail("'x' is expected");
        times = static_cast<int>(number(digits()));
        if (!accept(')')) fail("')' is expected");
      }
      if (static_cast<std::size_t>(times) > kMostNodes - all.size()) fail("there are too many nodes");
      all.insert(all.end(), static_cast<std::size_t>(times), count);
    } while (accept(','));
    if (at_ < list_.size()) fail(text("'", list_[at_], "' is not expected"));
    return all;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ClusterError(text(variable_, " is \"", list_.substr(0, 200), "\"; at character ", at_, " ", what));
  }

  bool accept(char c) {
    const bool there = at_ < list_.size() && list_[at_] == c;
    if (there) ++at_;
    return there;
  }

  void add(std::vector<std::string>& all, std::string name) const {
    if (all.size() == kMostNodes) fail("there are too many nodes");
    if (name.size() > kLongestName) fail(text("a name is longer than ", kLongestName, " characters"));
    all.push_back(std::move(name));
  }

  // Any sequence of text and brackets. Expands to every combination; the last bracket varies fastest.
  std::vector<std::string> names() {
    std::vector<std::string> all{""};
    const auto begin = at_;
    while (at_ < list_.size() && list_[at_] != ',') {
      const auto parts = accept('[') ? numbers() : std::vector<std::string>{plain()};
      std::vector<std::string> longer;
      for (const auto& start : all) {
        for (const auto& part : parts) add(longer, start + part);
      }
      all = std::move(longer);
    }
    if (at_ == begin) fail("a name is expected");
    return all;
  }

  std::string plain() {
    const auto begin = at_;
    while (at_ < list_.size() && list_[at_] != ',' && list_[at_] != '[') {
      if (list_[at_] == ']') fail("']' is not expected");
      ++at_;
    }
    return std::string(list_.substr(begin, at_ - begin));
  }

  // The numbers in brackets, up to the closing one: "1-3,07".
  std::vector<std::string> numbers() {
    std::vector<std::string> all;
    do {
      const auto first = digits();
      const auto last = accept('-') ? digits() : first;
      const auto from = number(first), to = number(last);
      if (to < from || to - from >= kMostNodes) fail(text("the range ", first, "-", last, " is not one"));
      for (auto n = from; n <= to; ++n) {
        auto name = std::to_string(n);
        if (name.size() < first.size()) name.insert(0, first.size() - name.size(), '0');
        add(all, name);
      }
    } while (accept(','));
    if (!accept(']')) fail("']' is expected");
    return all;
  }

  std::string_view digits() {
    const auto begin = at_;
    while (at_ < list_.size() && list_[at_] >= '0' && list_[at_] <= '9') ++at_;
    if (at_ == begin || at_ - begin > 9) fail("a number of at most 9 digits is expected");
    return list_.substr(begin, at_ - begin);
  }

  static std::size_t number(std::string_view digits) {
    std::size_t value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return value;
  }

  const std::string_view list_;
  const std::string& variable_;
  std::size_t at_ = 0;
};

}  // namespace

std::vector<std::string> expand_node_list(const std::string& list, const std::string& variable) {
  return Parser(list, variable).nodes();
}

std::vector<int> expand_task_counts(const std::string& counts, const std::string& variable) {
  return Parser(counts, variable).counts();
}

// Reads srun's variables: https://slurm.schedmd.com/srun.html. In a batch script, outside of a step, none is set.
std::optional<Cluster> from_slurm(const Environment& environment) {
  if (environment("SLURM_PROCID") == nullptr) return std::nullopt;
  if (environment("SLURM_STEP_NODELIST") == nullptr) {  // 0: a batch script
    if (number_of(environment, "SLURM_PROCID", 0, kMostRanks) == 0) return std::nullopt;
    throw ClusterError(
        text("SLURM_PROCID is \"", environment("SLURM_PROCID"),
             "\", and SLURM_STEP_NODELIST is not set: ", "start the program by srun, or unset SLURM_PROCID"));
  }
  Cluster cluster{.source = "Slurm"};
  auto& world = cluster.world;
  world.size = number_of(environment, "SLURM_STEP_NUM_TASKS", 1, kMostRanks);
  world.rank = number_of(environment, "SLURM_PROCID", 0, world.size - 1);
  const auto nodes = expand_node_list(text_of(environment, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST");
  const auto counts =
      expand_task_counts(text_of(environment, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE");
  if (counts.size() != nodes.size()) {
    throw ClusterError(
        text("SLURM_STEP_TASKS_PER_NODE is of ", counts.size(), " nodes, SLURM_STEP_NODELIST of ", nodes.size()));
  }
  const auto node =
      static_cast<std::size_t>(number_of(environment, "SLURM_NODEID", 0, static_cast<int>(nodes.size()) - 1));
  world.host = nodes[node];
  world.local_size = counts[node];
  world.local_rank = number_of(environment, "SLURM_LOCALID", 0, world.local_size - 1);
  if (world.size == 1) return cluster;
  cluster.store = nodes.size() == 1 ? "127.0.0.1" : nodes[0];
  cluster.job = text("Slurm ", text_of(environment, "SLURM_JOB_ID"), ".", text_of(environment, "SLURM_STEP_ID"));
  cluster.holds_store = world.rank == 0;
  return cluster;
}

}  // namespace lockstep::cluster
