#include "launch/part_output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/text.h"

namespace lockstep::launch {
namespace {

constexpr int kBetweenTriesMs = 100;

}  // namespace

PartOutput::PartOutput(int descriptor, ControlProtocol& control, double silent_seconds)
    : descriptor_(descriptor), control_(control), silent_seconds_(silent_seconds) {
  fcntl(descriptor, F_SETFL, O_NONBLOCK);
}

PartOutput::int_type PartOutput::overflow(int_type character) {
  if (character != traits_type::eof()) pending_ += traits_type::to_char_type(character);
  return traits_type::not_eof(character);
}

std::streamsize PartOutput::xsputn(const char* bytes, std::streamsize count) {
  pending_.append(bytes, static_cast<std::size_t>(count));
  return count;
}

int PartOutput::sync() {
  if (dropped_ > 0) {
    const auto lines = text(in_line_ ? "\n" : "", "lockstep: ", dropped_, " lines of this host were dropped\n");
    if (write(descriptor_, lines.data(), lines.size()) == static_cast<ssize_t>(lines.size())) {
      dropped_ = 0;
      in_line_ = false;
    }
  }
  bool writable = dropped_ == 0;
  std::size_t written = 0;
  while (writable && written < pending_.size()) {
    const auto count = write(descriptor_, pending_.data() + written, pending_.size() - written);
    if (count > 0) {
      written += static_cast<std::size_t>(count);
      in_line_ = pending_[written - 1] != '\n';
      continue;
    }
    writable = (errno == EAGAIN || errno == EINTR) && !control_.silent_for(silent_seconds_);
    pollfd poll_for{descriptor_, POLLOUT, 0};
    if (writable) poll(&poll_for, 1, kBetweenTriesMs);
  }
  dropped_ +=
      static_cast<int>(std::count(pending_.begin() + static_cast<std::ptrdiff_t>(written), pending_.end(), '\n'));
  pending_.clear();
  return 0;
}

}  // namespace lockstep::launch
