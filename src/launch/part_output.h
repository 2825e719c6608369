// What a launcher that another one started prints for it.
#pragma once

#include <streambuf>
#include <string>

#include "launch/control_protocol.h"

namespace lockstep::launch {

// Writes to a descriptor when it is flushed. Where that takes no more, it waits while the other launcher shows signs of
// life, which may read slowly; and drops what it has where that has been silent for so long: otherwise the ranks, which
// print into this process, would stop when the network to that launcher breaks.
class PartOutput : public std::streambuf {
 public:
  PartOutput(int descriptor, ControlProtocol& control, double silent_seconds);

 protected:
  int_type overflow(int_type character) override;
  std::streamsize xsputn(const char* bytes, std::streamsize count) override;
  int sync() override;

 private:
  const int descriptor_;
  ControlProtocol& control_;
  const double silent_seconds_;
  std::string pending_;
  bool in_line_ = false;  // a part of a line was written
  int dropped_ = 0;       // lines
};

}  // namespace lockstep::launch
