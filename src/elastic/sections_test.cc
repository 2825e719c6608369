// Simulates the members of a job. Members are killed, stopped and come; hosts are lost or cut off from each other. At
// any moment that this happens, the members have one history of steps, in which every example is used once.
#include "elastic/sections.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "base/text.h"
#include "elastic/simulated_job_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

using simulated::Job, simulated::SimulatedStores;

constexpr int kTrainings = 2, kEpochs = 2, kSteps = 2, kBuckets = 2, kExamples = 24;
constexpr double kToRegroup = 10, kToComplete = 8, kToMissAHost = 3;  // seconds of virtual time

// A worker, whose training records the examples that each step has used.
class Worker final : public Member {
 public:
  Worker(Job& job, const Members& members, int part)
      : job_(job), part_(part), stores_(std::make_shared<SimulatedStores>(job)), members_(members) {
    job_.name_of[job_.time.self()] = members_.self().name;
  }

  int rank() const override { return members_.world.rank; }
  int size() const override { return members_.world.size; }
  std::int64_t generation() const override { return members_.world.generation; }

  std::vector<std::string> all_gather(const std::string& mine) override {
    std::vector<std::string> all;
    for (const auto& [rank, theirs] : operate("all_gather", mine).arrived) all.push_back(theirs);
    return all;
  }
  std::string broadcast(const std::string& bytes, int root) override {
    return operate(text("broadcast from ", root), bytes).arrived.at(root);
  }
  int row_size() const override { return job_.row_size; }
  std::string broadcast_part(const std::string& bytes, int row) override {
    return operate(text("broadcast of parts from row ", row), bytes).arrived.at(row * row_size() + part_);
  }

  // Returns the union of the members' sets of examples.
  std::uint32_t unite(const std::string& kind, std::uint32_t mine) {
    std::uint32_t all = 0;
    for (const auto& theirs : operate(kind, std::to_string(mine)).arrived) {
      const auto set = static_cast<std::uint32_t>(std::stoul(theirs.second));
      job_.expect((all & set) == 0, "an example is used twice in a step");
      all |= set;
    }
    return all;
  }

  void regroup(const Change& change) override {
    stores_->until = job_.time.now() + kToRegroup;
    Registry registry(stores_, members_);
    auto in_rows = change;
    in_rows.row_size = job_.row_size;
    members_ = next_generation(members_, registry, in_rows, Deadline::never());
    if (!change.leaves) make_group();
  }

  // Makes the group of this generation; the worker's earlier group is gone then.
  void make_group() {
    operations_ = 0;
    job_.expect(size() % row_size() == 0 && rank() % row_size() == part_, "a row is not whole");
    operate("group", "", kToRegroup);
    job_.generation_of[job_.time.self()] = generation();
    job_.time.notify();
  }

  // Waits until the newcomer is invited; false where the training ended before.
  bool is_invited(const Process& newcomer) {
    for (const double until = job_.time.now() + kToRegroup; job_.time.now() < until;) {
      const auto found = stores_->get(newcomer.store, {key_of_invitation(newcomer.name)}, Deadline::never())[0];
      if (found) members_ = place_in(*found, {.host = newcomer.host});
      if (found) return true;
    }
    return false;
  }

  std::int64_t steps() const override { return steps_; }
  std::int64_t updates() const override { return static_cast<std::int64_t>(history.size()) - before_; }
  void set_steps(std::int64_t steps) override { steps_ = steps; }
  std::string print_update() override { return join_lines(history); }
  void take_update(const std::string& printed) override {
    // A member that has another part of the model cannot give the update.
    job_.expect(row_size() == 1 || prepared_ == steps_, "an update is taken that was not prepared here");
    history = lines(printed);
  }
  std::string print_all() override {
    return text(steps_, " ", before_, " ", training, " ", epoch, " ", step, "\n", join_lines(history));
  }
  std::string print_part() override { return text("part ", part_); }
  void take_all(const std::string& printed, const std::string& printed_part) override {
    job_.expect(printed_part == text("part ", part_), "a newcomer gets another part than its own");
    std::istringstream(printed) >> steps_ >> before_ >> training >> epoch >> step;
    history = lines(printed.substr(printed.find('\n') + 1));
  }
  void on_loss(const std::exception&) override {}
  void on_regrouped(int, bool) override {}

  // Runs trainings one after the other, each with another model.
  void train_all(Sections& first, const std::function<bool()>& leaves) {
    if (!train(first, leaves)) return;
    while (++training < kTrainings) {
      Sections sections(*this, completed);
      before_ = static_cast<std::int64_t>(history.size());
      steps_ = epoch = 0;
      if (!train(sections, leaves)) return;
    }
    job_.histories.push_back(history);
    job_.trained.insert(job_.time.self());
    job_.ended = job_.time.now();
  }

  std::vector<std::string> history;
  int training = 0, epoch = 0, step = 0;
  Sections::Completed completed;

 private:
  // Trains as fit does. Returns false where this worker has left.
  bool train(Sections& sections, const std::function<bool()>& leaves) {
    for (; epoch < kEpochs; ++epoch, step = 0) {
      if (training == kTrainings - 1 && epoch == kEpochs - 1) job_.near_end = std::min(job_.near_end, job_.time.now());
      while (step < kSteps) {
        bool leaving = false, changes = false;
        const auto act = [&]() -> Sections::Numbers {
          if (!sections.updated) update();
          sections.updated = true;
          leaving = leaves();
          Sections::Numbers sums(2);
          for (const auto& theirs : all_gather(text(rank() == 0 ? job_.waiting().size() : 0, " ", leaving ? 1 : 0))) {
            std::istringstream words(theirs);
            for (double& sum : sums) {
              double value = 0;
              words >> value;
              sum += value;
            }
          }
          return {sums[0], sums[1], static_cast<double>(size())};
        };
        sections.run(act, [&](const auto& sums) {
          ++step;
          const bool all_leave = sums[1] == sums[2];
          leaving = leaving && !all_leave;
          changes = sums[0] + sums[1] > 0 && !all_leave;
        });
        Change change{.leaves = leaving};
        if (changes && rank() == 0) change.newcomers = job_.waiting();
        if (changes && sections.change(change) && leaving) return false;
        job_.time.pass_some_time();
      }
      sections.run([&]() -> Sections::Numbers { return {static_cast<double>(all_gather("evaluation").size())}; },
                   [](const auto&) {});
    }
    return true;
  }

  void update() {
    std::uint32_t all[kBuckets] = {};
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      std::uint32_t mine = 0;
      for (int example = rank(); example < kExamples; example += size()) mine |= std::uint32_t{1} << example;
      job_.time.pass_some_time();
      all[bucket] = unite(text("bucket ", bucket), mine);
    }
    prepared_ = steps_;
    if (row_size() > 1) operate("commit", "");
    for (const auto set : all) job_.expect(set == (std::uint32_t{1} << kExamples) - 1, "a step lacks examples");
    std::string names;
    for (const auto& process : members_.processes) names += " " + process.name;
    history.push_back(text("training ", training, " epoch ", epoch, " step ", step, " by", names));
    ++steps_;
    job_.expect(steps_ == updates(), "a step is counted twice or not at all");
  }

  // Makes a collective operation: each rank contributes, and when all have, each gets the result. Where a rank is lost
  // meanwhile, some get the result, and some do not.
  Job::Operation operate(const std::string& kind, const std::string& mine, double longest = kToComplete) {
    auto& time = job_.time;
    const auto number = operations_++;
    const auto group = generation();
    time.pass_some_time();
    job_.process_of.try_emplace({group, rank()}, time.self());
    auto& operation = job_.operations[{group, number}];
    if (operation.kind.empty()) operation.kind = kind;
    job_.expect(operation.kind == kind, text(kind, " where another member calls ", operation.kind));
    operation.arrived[rank()] = mine;
    time.notify();
    if (number > 0 && size() > 1 && time.chance(job_.broken_links)) {
      throw PeerLost((rank() + 1 + time.random_below(size() - 1)) % size(), group, "a link broke");
    }
    const auto complete = [&] { return missing(operation, group).empty(); };
    const double until = time.now() + longest;
    while (!complete()) {
      if (kind == "group") throw_if_gone();
      if (const auto lost = lost_rank(group)) throw PeerLost(*lost, group, "its process ended");
      const auto late = missing(operation, group);
      if (late.empty()) break;  // they came while this one looked for losses
      if (time.now() >= until) throw DeadlineExceeded(kind, std::chrono::duration<double>(longest), late);
      time.wait([&] { return complete() || lost_rank(group); }, std::min(until, time.now() + 0.05));
    }
    time.pass_some_time();
    const auto lost = lost_rank(group);
    if (lost && !has_trained(*lost, group) && time.chance(0.5)) throw PeerLost(*lost, group, "its process ended");
    return operation;
  }

  // Throws where a member has gone. While a group is made, the others are known by their names alone.
  void throw_if_gone() {
    cluster::Liveness liveness(stores_);
    if (const auto rank = first_lost(members_, liveness)) {
      throw PeerLost(*rank, generation(), "its process ended");
    }
  }

  // Returns a rank of the group whose loss is noticed: it has ended, has a later group, or its host is cut off.
  std::optional<int> lost_rank(std::int64_t group) const {
    for (int rank = 0; rank < size(); ++rank) {
      const auto found = job_.process_of.find({group, rank});
      if (rank == members_.world.rank || found == job_.process_of.end()) continue;
      const double cut = job_.cut_since(job_.host(), job_.host_of[static_cast<std::size_t>(found->second)]);
      if (cut >= kToMissAHost) return rank;
      if (cut >= 0) continue;
      const auto has = job_.generation_of.find(found->second);
      const bool went_on = has != job_.generation_of.end() && has->second > group;
      if (!job_.time.is_alive(found->second) || went_on) return rank;
    }
    return {};
  }

  bool has_trained(int rank, std::int64_t group) const {
    return job_.trained.contains(job_.process_of.at({group, rank}));
  }

  std::vector<int> missing(const Job::Operation& operation, std::int64_t group) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      const bool is_there = operation.arrived.contains(rank);
      const auto cut = [&] {
        const auto process = static_cast<std::size_t>(job_.process_of.at({group, rank}));
        return job_.cut_since(job_.host(), job_.host_of[process]) >= 0;
      };
      if (!is_there || cut()) ranks.push_back(rank);
    }
    return ranks;
  }

  static std::string join_lines(const std::vector<std::string>& all) { return lockstep::join(all, "\n"); }
  static std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> all;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  }

  Job& job_;
  const int part_;
  const std::shared_ptr<SimulatedStores> stores_;
  Members members_;
  std::int64_t steps_ = 0, before_ = 0;  // of this training; updates of earlier trainings
  std::int64_t prepared_ = -1;           // the step whose update this worker can make
  int operations_ = 0;                   // of this generation
};

// Runs a simulation; returns the problem that it found, or an empty text.
[[maybe_unused]] std::string simulate(unsigned seed) {
  Job job(seed);
  auto& time = job.time;
  job.row_size = time.chance(0.5) ? 1 : 2;
  const int members = job.row_size * (2 + time.random_below(4 / job.row_size)),
            newcomers = job.row_size * time.random_below(4 - job.row_size);
  const auto row_of = [&](int process) { return process / job.row_size; };
  const int hosts = time.chance(0.4) ? 1 : 2 + time.random_below(4);
  job.entries.resize(static_cast<std::size_t>(hosts));
  std::vector<std::string> stores;  // [rank]
  for (int i = 0; i < members + newcomers; ++i) {
    job.host_of.push_back(i < members ? row_of(i) * job.row_size * hosts / members : time.random_below(hosts));
    if (i < members) stores.push_back(Job::store_of(job.host_of.back()));
  }
  const double duration = 0.25;
  const int safe = time.random_below(members);  // the processes of its row stay undisturbed
  const int safe_host = job.host_of[static_cast<std::size_t>(safe)];
  job.broken_links = time.chance(0.2) ? 0.01 : 0;
  const bool is_divided = hosts > 1 && time.chance(0.5);
  if (is_divided) {
    for (int host = 0; host < hosts; ++host) {
      if (host != safe_host && time.chance(0.5)) job.cut_off.insert(host);
    }
    job.cut_from = time.random(0.03, duration);
    job.cut_until = time.chance(0.3) ? INFINITY : job.cut_from + time.random(0, 20);
  }
  job.has_long_waits = job.broken_links > 0 || is_divided;
  const auto process = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (const ClusterError&) {  // the others took it for lost, or were all lost too early
    } catch (const std::exception& error) {
      job.expect(false, text("an error: ", error.what()));
    }
  };
  // Changes of the members change which hosts have members, and so which of them decide.
  bool members_change = newcomers > 0;
  for (int rank = 0; rank < members; ++rank) {
    const double leaves = row_of(rank) != row_of(safe) && time.chance(0.1) ? time.random(0, duration) : INFINITY;
    members_change |= leaves < INFINITY;
    time.start(time.random(0, 0.01), [&, rank, leaves] {
      process([&] {
        Worker worker(job, first_members({.rank = rank, .size = members}, stores, stores), rank % job.row_size);
        Sections sections(worker, worker.completed);
        worker.make_group();
        worker.train_all(sections, [&, leaves] { return time.now() > leaves; });
      });
    });
  }
  for (int i = 0; i < newcomers; ++i) {
    time.start(time.random(0, duration), [&, i] {
      process([&] {
        auto self = Job::process_at(text("newcomer-", i), job.host());
        self.part = i % job.row_size;
        Worker worker(job, {.world = {}, .processes = {self}, .stores = {}}, self.part);
        job.newcomers.push_back(self);
        Sections sections(worker, worker.completed);
        const double came = time.now();
        if (!worker.is_invited(self))
          return job.expect(
              came > job.near_end || job.has_long_waits || job.row_size > 1,  // the others of its row may lack
              "a newcomer was not taken in");
        sections.join([&] { worker.make_group(); });
        worker.train_all(sections, [] { return false; });
      });
    });
  }
  const int kills = time.random_below(members + newcomers);
  for (int i = 0; i < kills; ++i) {
    const int victim = time.random_below(members + newcomers);
    const double moment = time.random(0.03, duration);  // not before all have come
    if (victim < members && row_of(victim) == row_of(safe)) continue;
    members_change = true;
    if (time.chance(0.7)) {
      time.kill_at(moment, victim);
    } else {
      const bool is_long = time.chance(0.5);
      job.has_long_waits |= is_long;
      time.stop_at(moment, is_long ? time.random(5, 60) : time.random(0, 0.1), victim);
    }
  }
  if (!time.run(1000)) job.expect(false, "somebody waits for ever");
  const bool may_be_in_the_minority = is_divided && (members_change || !job.is_majority(stores));
  // A member of a row may have ended when another one finds that a third was lost in the last section: the row ends.
  const bool has_trained = std::any_of(job.trained.begin(), job.trained.end(),
                                       [&](int one) { return one < members && row_of(one) == row_of(safe); });
  job.expect(has_trained || job.broken_links > 0 || may_be_in_the_minority,
             "who was not disturbed has not trained to the end");
  job.expect(job.has_long_waits || job.ended < 3, text("the training took ", job.ended, " s"));
  for (const auto& history : job.histories) {
    job.expect(history == job.histories[0], text("two histories: ", join(history), "; ", join(job.histories[0])));
    bool is_whole = history.size() == kTrainings * kEpochs * kSteps;
    for (std::size_t i = 0; i < history.size() && is_whole; ++i) {
      const auto epoch = i / kSteps;
      is_whole = history[i].starts_with(
          text("training ", epoch / kEpochs, " epoch ", epoch % kEpochs, " step ", i % kSteps, " by"));
    }
    job.expect(is_whole, text("a history of ", join(history)));
  }
  return job.problem;
}

#if !defined(__SANITIZE_THREAD__)  // all of it is one thread, whose stacks that sanitizer does not follow
TEST(Sections, KeepOneHistoryWhateverHappens) {
  const char* const asked = std::getenv("LOCKSTEP_SEEDS");  // "100000", or "5-5"
  const std::string range = asked == nullptr ? "1000" : asked;
  const auto dash = range.find('-');
  const unsigned first = dash == std::string::npos ? 0 : static_cast<unsigned>(std::stoul(range)),
                 last = static_cast<unsigned>(std::stoul(range.substr(dash == std::string::npos ? 0 : dash + 1)));
  for (unsigned seed = first; seed <= last; ++seed) {
    const auto problem = simulate(seed);
    ASSERT_EQ(problem, "") << "seed " << seed << ": LOCKSTEP_SEEDS=" << seed << "-" << seed << " runs it again";
  }
}
#endif

}  // namespace
}  // namespace lockstep::elastic
