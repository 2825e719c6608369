// Functions that the callbacks that save share.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "train/model_impl.h"

namespace lockstep {

// Returns how long a fit that throws waits for the others' parts of a checkpoint: not at all where the others go on,
// and write another one.
inline std::chrono::seconds for_other_workers(const Model& model) {
  return std::chrono::seconds(unwrap(model.strategy()).workers().is_elastic() ? 0 : 10);
}

// Returns why act() failed; empty where it did not.
std::string done_or_why(const char* callback, const auto& act) {
  try {
    act();
    return {};
  } catch (const IoError& error) {  // thrown on all workers
    return text(callback, ": ", error.what());
  }
}

// Saves, called by all workers. Where the chief is lost meanwhile, the next chief saves. Returns as done_or_why.
std::string saved_or_why(const Model& model, const char* callback, const auto& save) {
  std::string problem;
  unwrap(model).on_all_in_section(callback, [&] { problem = done_or_why(callback, save); });
  return problem;
}

// Called by all workers before they make a checkpoint again. Those that train by themselves come together for it: the
// step may be between two meetings.
inline void prepare_again(const Model& model, const char* callback, const std::string& path) {
  auto& impl = unwrap(model);
  if (impl.gradients->outer_step() != nullptr)
    impl.on_all_in_section(callback, [&] { impl.gradients->come_together(); });
  if (!model.strategy().is_chief()) return;
  log_warning(text(callback, ": ", path, " was not whole when the workers changed: it is made again, of this step"));
}

// Where the disk is full, or is gone, training goes on without this checkpoint.
inline void warn_of(const Model& model, const std::string& problem) {
  if (!problem.empty() && model.strategy().is_chief())
    log_warning(problem + "; training goes on without this checkpoint");
}

std::string save_or_warn(const Model& model, const char* callback, const auto& save) {
  auto problem = saved_or_why(model, callback, save);
  warn_of(model, problem);
  return problem;
}

}  // namespace lockstep

namespace lockstep::train {

// Names of checkpoints such as "weights/{epoch:02d}-{val_loss:.2f}".

// Replaces each {name} and {name:format} by value_of(name), in Python's formats of numbers. Throws InvalidArgument for
// other formats, and for more digits than a file's name has room for.
std::string fill_in(const std::string& path, const std::function<double(const std::string& name)>& value_of);

// The innermost folder of the path that is the same for all checkpoints.
std::string fixed_folder_of(const std::string& filepath);

}  // namespace lockstep::train
