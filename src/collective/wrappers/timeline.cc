#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "cluster/store_texts.h"
#include "collective/calls.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/collective/group_wrappers.h"

namespace lockstep {
namespace {

// Tracks have numbers: those of GPUs begin here.
constexpr int kFirstTrackOfGpus = 1 << 20;

// Names of tensors are the user's, and may be no UTF-8.
std::string dumped(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

using Clock = Deadline::Clock;

// The first so many are kept: about 10 MB of text.
constexpr std::size_t kMostEvents = 50'000;
constexpr std::chrono::seconds kToPublish(60);

struct Event {
  enum class Track : std::uint8_t { host, gpu };

  Track track = Track::host;
  std::string operation;
  std::shared_ptr<const std::string> tensors;
  const char* algorithm;
  std::size_t bytes;
  Clock::time_point called, began, ended;
};

}  // namespace

struct Timeline::State {
  void add(Event event) {
    MutexLock lock(mutex);
    if (events.size() < kMostEvents) events.push_back(std::move(event));
  }

  nlohmann::json of_rank(int rank, std::int64_t group = 0);

  // Calls on a GPU run one after the other, though they are enqueued earlier.
  void add_of_gpu(Event event) {
    event.track = Event::Track::gpu;
    event.ended = Clock::now();
    {
      MutexLock lock(mutex);
      event.began = std::max(event.began, std::exchange(gpu_is_free, event.ended));
    }
    add(std::move(event));
  }

  Mutex mutex;
  std::vector<Event> events LOCKSTEP_GUARDED_BY(mutex);
  Clock::time_point gpu_is_free LOCKSTEP_GUARDED_BY(mutex);
  Clock::time_point origin;
};

nlohmann::json Timeline::State::of_rank(int rank, std::int64_t group) {
  const auto microseconds = [](Clock::duration time) {
    return std::chrono::duration<double, std::micro>(time).count();
  };
  auto all = nlohmann::json::array();
  const auto add_track = [&](int track, const std::string& name, int place) {
    const auto add_fact = [&](const char* fact, const nlohmann::json& arguments) {
      all.push_back({{"ph", "M"}, {"pid", group}, {"tid", track}, {"name", fact}, {"args", arguments}});
    };
    add_fact("thread_name", {{"name", name}});
    add_fact("thread_sort_index", {{"sort_index", place}});
  };
  MutexLock lock(mutex);
  const auto is_of_gpu = [](const Event& event) { return event.track == Event::Track::gpu; };
  add_track(rank, text("rank ", rank), 2 * rank);
  if (std::ranges::any_of(events, is_of_gpu)) {
    add_track(kFirstTrackOfGpus + rank, text("rank ", rank, ", on its GPU"), 2 * rank + 1);
  }
  for (const auto& event : events) {
    nlohmann::json arguments{{"bytes", event.bytes},
                             {"algorithm", event.algorithm},
                             {"queued_us", microseconds(event.began - event.called)}};
    if (event.tensors) arguments["tensors"] = *event.tensors;
    all.push_back({{"ph", "X"},
                   {"pid", group},
                   {"tid", is_of_gpu(event) ? kFirstTrackOfGpus + rank : rank},
                   {"name", event.operation},
                   {"ts", microseconds(event.began - origin)},
                   {"dur", microseconds(event.ended - event.began)},
                   {"args", std::move(arguments)}});
  }
  return all;
}

namespace {

class Recorder : public collective::Wrapper {
 public:
  Recorder(std::shared_ptr<GroupBackend> recorded, std::shared_ptr<Timeline::State> state)
      : collective::Wrapper(std::move(recorded)), state_(std::move(state)) {}

  const char* run(const Call& call, Deadline deadline) override {
    return record(call, std::max(call.input.bytes(), call.output.bytes()),
                  [&] { return collective::Wrapper::run(call, deadline); });
  }
  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    std::size_t bytes = 0;
    for (const auto& call : calls) bytes += call.input.bytes() + call.output.bytes();
    return record(calls.front(), bytes, [&] { return collective::Wrapper::exchange(calls, deadline); });
  }

  // Calls that are enqueued together are one operation, which ends when the GPU has done it.
  EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) override {
    std::size_t bytes = 0;
    for (const auto& call : calls) bytes += std::max(call.input.bytes(), call.output.bytes());
    auto event = begun(calls.front(), bytes);
    if (calls.size() > 1) event.operation += text(" and ", calls.size() - 1, " more");
    try {
      auto enqueued = collective::Wrapper::enqueue(calls, deadline);
      enqueued.ended->then([state = state_, event, algorithm = enqueued.algorithm](bool have_succeeded) mutable {
        if (have_succeeded) event.algorithm = algorithm;
        state->add_of_gpu(std::move(event));
      });
      return enqueued;
    } catch (...) {
      state_->add_of_gpu(std::move(event));
      throw;
    }
  }

 protected:
  Timeline::State* state() const { return state_.get(); }

 private:
  static Event begun(const Call& call, std::size_t bytes) {
    const auto now = Clock::now();
    const auto called = call.called == Clock::time_point() ? now : call.called;
    return {Event::Track::host, name_of(call.kind), call.tensors, "failed", bytes, called, now, now};
  }

  // Failed operations are recorded too.
  template <class Act>
  const char* record(const Call& call, std::size_t bytes, const Act& act) {
    struct Entry {
      ~Entry() {
        event.ended = Clock::now();
        state.add(std::move(event));
      }
      Timeline::State& state;
      Event event;
    };
    Entry entry{*state_, begun(call, bytes)};
    return entry.event.algorithm = act();
  }

  const std::shared_ptr<Timeline::State> state_;
};

class PublishingRecorder final : public Recorder {
 public:
  PublishingRecorder(std::shared_ptr<GroupBackend> recorded, std::shared_ptr<Timeline::State> state, const Store& store,
                     std::int64_t number)
      : Recorder(std::move(recorded), std::move(state)), store_(store), number_(number) {}

  ~PublishingRecorder() override {
    try {
      inner().synchronize(Deadline::after(kToPublish));
    } catch (const Error&) {  // the calls that failed are recorded
    }
    try {
      cluster::publish_text(store_, cluster::kTimelines, dumped(state()->of_rank(rank(), number_)),
                            Deadline::after(kToPublish));
    } catch (const Error& error) {
      log_warning(text("the timeline of rank ", rank(), " is lost: ", error.what()));
    }
  }

 private:
  const Store store_;
  const std::int64_t number_;  // of the group, on all its ranks
};

void write_file(const std::string& path, nlohmann::json events) {
  std::ofstream file(path);
  file << dumped({{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}});
  if (!file.flush()) throw IoError(text("cannot write the timeline ", path, ": ", std::strerror(errno)));
}

}  // namespace

Timeline::Timeline() : state_(std::make_shared<State>()) {}

Group with_timeline(const Group& group, Timeline& timeline, Deadline deadline) {
  group.barrier(deadline);
  timeline.state_->origin = Clock::now();
  return group.with_backend(std::make_shared<Recorder>(group.shared_backend(), timeline.state_));
}

void Timeline::write(const std::string& path, const Group& group, Deadline deadline) const {
  group.synchronize(deadline);
  std::string bytes = dumped(state_->of_rank(group.rank()));
  std::int64_t length = static_cast<std::int64_t>(bytes.size());
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(group.size()));
  group.all_gather(buffer_of(std::span(&length, 1)), buffer_of(std::span(lengths)), deadline);
  const Counts counts(lengths.begin(), lengths.end());
  std::string all;
  for (const auto count : counts) all.append(group.rank() == 0 ? count : 0, '\0');
  group.run(Call::gather({bytes.data(), bytes.size(), DType::uint8}, {all.data(), all.size(), DType::uint8}, 0, counts),
            deadline);
  if (group.rank() != 0) return;

  auto events = nlohmann::json::array();
  std::size_t begin = 0;
  for (const auto count : counts) {
    for (auto& event : nlohmann::json::parse(all.substr(begin, count))) events.push_back(std::move(event));
    begin += count;
  }
  write_file(path, std::move(events));
}

bool collective::timeline_is_wanted() {
  const char* const wanted = std::getenv("LOCKSTEP_TIMELINE");
  return wanted != nullptr && std::string(wanted) == "1";
}

Group collective::with_published_timeline(const Group& group, const Store& store, Deadline deadline) {
  const auto root = store.without_prefix();
  std::int64_t number = group.rank() == 0 ? root.add("groups with a timeline", 1, deadline) : 0;
  group.broadcast(buffer_of(std::span(&number, 1)), 0, deadline);
  group.barrier(deadline);
  static const auto origin = Clock::now();
  auto state = std::make_shared<Timeline::State>();
  state->origin = origin;
  return group.with_backend(
      std::make_shared<PublishingRecorder>(group.shared_backend(), std::move(state), root, number));
}

}  // namespace lockstep
