// A pipeline's step as a file for chrome://tracing.
#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/pipeline_schedule.h"

namespace lockstep::parallel {

// One rank's events: a JSON array. `times` of `actions`, in seconds since `began`.
std::string timeline_events(const std::vector<PipelineAction>& actions, const std::vector<PipelineTimes::Span>& times,
                            int rank, double began);

// Throws IoError.
void write_timeline(const std::string& path, const std::vector<std::string>& events_of_ranks);

}  // namespace lockstep::parallel
