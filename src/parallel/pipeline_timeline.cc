#include "parallel/pipeline_timeline.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parallel {
namespace {

constexpr double kMicroseconds = 1e6;
constexpr const char* kNames[] = {"forward", "backward", "backward_input", "backward_weight"};

}  // namespace

std::string timeline_events(const std::vector<PipelineAction>& actions, const std::vector<PipelineTimes::Span>& times,
                            int rank, double began) {
  std::vector<std::string> events{
      text(R"({"ph":"M","pid":0,"tid":)", rank, R"(,"name":"thread_name","args":{"name":"rank )", rank, R"("}})")};
  for (std::size_t i = 0; i < times.size(); ++i) {
    std::ostringstream event;
    event.precision(3);
    event << std::fixed << R"({"ph":"X","pid":0,"tid":)" << rank << R"(,"name":")"
          << kNames[static_cast<std::size_t>(actions[i].kind)] << R"(","ts":)"
          << kMicroseconds * (began + times[i].begin) << R"(,"dur":)" << kMicroseconds * (times[i].end - times[i].begin)
          << R"(,"args":{"stage":)" << actions[i].stage << R"(,"microbatch":)" << actions[i].microbatch << "}}";
    events.push_back(event.str());
  }
  return join(events, ",\n");
}

void write_timeline(const std::string& path, const std::vector<std::string>& events_of_ranks) {
  std::ofstream out(path);
  out << R"({"traceEvents":[)"
      << "\n"
      << join(events_of_ranks, ",\n") << "\n]}\n";
  out.close();
  if (!out) throw IoError(text("cannot write ", path, ": ", std::strerror(errno)));
}

}  // namespace lockstep::parallel
