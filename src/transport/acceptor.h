// Takes connections, and has each prove that it belongs to the job, many at a time: whoever is silent keeps nobody else
// waiting.
#pragma once

#include <poll.h>

#include <memory>
#include <span>
#include <vector>

#include "transport/handshake.h"

namespace lockstep::transport {

// Of one thread. No more than a bounded number are proving at a time, so that strangers do not use up this process's
// descriptors. Then new ones wait in the listener's queue until one is done, or has had its time and is turned away:
// 100 ms to say the first word, two seconds in all. Those that belong need less. Warnings of who was turned away are
// written once a minute.
class Acceptor {
 public:
  // `who` and `refuse` are the accepting end's (transport/handshake.h). The listener must outlive this object.
  Acceptor(const FileDescriptor& listener, Access access, const Greeting& who, Refuse refuse);

  struct Accepted {
    FileDescriptor socket;
    Greeting greeting;
  };

  // For a caller with more to wait for: appends what poll(2) is to wait for, and takes what it said of that. Where
  // `busy`, poll for kLongestPoll at most.
  static constexpr int kLongestPoll = 100;  // milliseconds
  void watch(std::vector<pollfd>& polls) const;
  bool busy() const { return no_descriptors_ || !proving_.empty(); }
  std::vector<Accepted> advance(std::span<const pollfd> polled);

  // For one with nothing else: waits for the next. Throws DeadlineExceeded.
  Accepted next(Deadline deadline);

 private:
  void take_new();
  bool make_room();

  const FileDescriptor& listener_;
  const Access access_;
  const Greeting who_;
  const Refuse refuse_;
  const std::size_t most_;
  std::vector<std::unique_ptr<AcceptingEnd>> proving_;  // the oldest first
  std::vector<Accepted> accepted_;                      // for next
  bool no_descriptors_ = false;                         // this process can have no more for now
};

}  // namespace lockstep::transport
