#include "checkpoint/background_writer.h"

#include <utility>

namespace lockstep::checkpoint {

void BackgroundWriter::wait() {
  if (thread_.joinable()) thread_.join();
  if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
}

void BackgroundWriter::start(std::function<void()> write) {
  ended_ = false;
  thread_ = std::jthread([this, write = std::move(write)] {
    try {
      write();
      ended_ = true;
    } catch (...) {
      failed_ = std::current_exception();
    }
  });
}

}  // namespace lockstep::checkpoint
