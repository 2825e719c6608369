#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/mutex.h"
#include "base/text.h"
#include "collective/calls.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/group_wrappers.h"

namespace lockstep {
namespace {

using Clock = Deadline::Clock;

struct Event {
  std::string operation;
  const char* algorithm;
  std::size_t bytes;
  Clock::time_point called, began, ended;
};

}  // namespace

struct Timeline::State {
  Mutex mutex;
  std::vector<Event> events LOCKSTEP_GUARDED_BY(mutex);
  Clock::time_point origin;
};

namespace {

class Recorder final : public Wrapper {
 public:
  Recorder(std::shared_ptr<GroupBackend> recorded, std::shared_ptr<Timeline::State> state)
      : Wrapper(std::move(recorded)), state_(std::move(state)) {}

  const char* run(const Call& call, Deadline deadline) override {
    return record(call, std::max(call.input.bytes(), call.output.bytes()),
                  [&] { return Wrapper::run(call, deadline); });
  }
  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    std::size_t bytes = 0;
    for (const auto& call : calls) bytes += call.input.bytes() + call.output.bytes();
    return record(calls.front(), bytes, [&] { return Wrapper::exchange(calls, deadline); });
  }

 private:
  // What throws is recorded too: it is what one wants to see.
  template <class Act>
  const char* record(const Call& call, std::size_t bytes, const Act& act) {
    struct Entry {
      ~Entry() {
        event.ended = Clock::now();
        MutexLock lock(state.mutex);
        state.events.push_back(std::move(event));
      }
      Timeline::State& state;
      Event event;
    };
    const auto now = Clock::now();
    const auto called = call.called == Clock::time_point() ? now : call.called;
    Entry entry{*state_, {name_of(call.kind), "failed", bytes, called, now, now}};
    return entry.event.algorithm = act();
  }

  const std::shared_ptr<Timeline::State> state_;
};

}  // namespace

Timeline::Timeline() : state_(std::make_shared<State>()) {}

Group with_timeline(const Group& group, Timeline& timeline, Deadline deadline) {
  group.barrier(deadline);
  timeline.state_->origin = Clock::now();
  return group.with_backend(std::make_shared<Recorder>(group.shared_backend(), timeline.state_));
}

void Timeline::write(const std::string& path, const Group& group, Deadline deadline) const {
  const auto microseconds = [&](Clock::duration time) {
    return std::chrono::duration<double, std::micro>(time).count();
  };
  auto mine = nlohmann::json::array();
  mine.push_back({{"ph", "M"},
                  {"pid", 0},
                  {"tid", group.rank()},
                  {"name", "thread_name"},
                  {"args", {{"name", text("rank ", group.rank())}}}});
  {
    MutexLock lock(state_->mutex);
    for (const auto& event : state_->events) {
      mine.push_back({{"ph", "X"},
                      {"pid", 0},
                      {"tid", group.rank()},
                      {"name", event.operation},
                      {"ts", microseconds(event.began - state_->origin)},
                      {"dur", microseconds(event.ended - event.began)},
                      {"args",
                       {{"bytes", event.bytes},
                        {"algorithm", event.algorithm},
                        {"queued_us", microseconds(event.began - event.called)}}}});
    }
  }
  std::string bytes = mine.dump();
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
  std::ofstream file(path);
  file << nlohmann::json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}};
  if (!file.flush()) throw IoError(text("cannot write the timeline ", path, ": ", std::strerror(errno)));
}

}  // namespace lockstep
