#include "parallel/pipeline_timeline.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parallel {
namespace {

using nlohmann::json;

constexpr double kMicroseconds = 1e6;

}  // namespace

std::string timeline_events(const std::vector<PipelineAction>& actions, const std::vector<PipelineTimes::Span>& times,
                            int rank, double began) {
  json events{
      {{"ph", "M"}, {"pid", 0}, {"tid", rank}, {"name", "thread_name"}, {"args", {{"name", text("rank ", rank)}}}}};
  for (std::size_t i = 0; i < times.size(); ++i) {
    events.push_back({{"ph", "X"},
                      {"pid", 0},
                      {"tid", rank},
                      {"name", name_of(actions[i].kind)},
                      {"ts", kMicroseconds * (began + times[i].begin)},
                      {"dur", kMicroseconds * (times[i].end - times[i].begin)},
                      {"args", {{"stage", actions[i].stage}, {"microbatch", actions[i].microbatch}}}});
  }
  return events.dump();
}

void write_timeline(const std::string& path, const std::vector<std::string>& events_of_ranks) {
  json all = json::array();
  for (const auto& events : events_of_ranks) {
    for (auto& event : json::parse(events)) all.push_back(std::move(event));
  }
  std::ofstream out(path);
  out << json{{"traceEvents", std::move(all)}, {"displayTimeUnit", "ms"}};
  out.close();
  if (!out) throw IoError(text("cannot write ", path, ": ", std::strerror(errno)));
}

}  // namespace lockstep::parallel
