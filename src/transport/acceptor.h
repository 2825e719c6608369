// Accepts connections and lets many prove at a time that they belong to the job, so that a silent one blocks no other.
#pragma once

#include <poll.h>

#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "transport/handshake.h"

namespace lockstep::transport {

// The most connections at a time whose other ends have not proved that they belong to the job: an eighth of this
// process's descriptors, and at most 256.
std::size_t most_that_prove();

// Used by one thread. The number of connections in the handshake is bounded, so that strangers do not use up this
// process's descriptors. Further ones wait in the listener's queue until one completes, or is turned away because it
// exceeded its time. A connection has 100 ms for its opening, which no stranger can make, and two seconds in all.
// Processes of the job need less, and connect again where they were slower. An opening counts once: a stranger who
// heard one cannot hold a place with it. Warnings about connections that were turned away are written once a minute.
class Acceptor {
 public:
  // `who`, `refuse` and `bound` are the accepting end's (transport/handshake.h). The listener must outlive this object.
  Acceptor(const FileDescriptor& listener, Access access, const Greeting& who, Refuse refuse,
           Bound bound = Bound::to_address);
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // For a caller that waits for other events too: `watch` appends the descriptors for poll(2), and `advance` takes its
  // results. While `busy`, poll for at most kLongestPoll.
  static constexpr int kLongestPoll = 100;  // milliseconds
  void watch(std::vector<pollfd>& polls) const;
  bool busy() const { return no_descriptors_ || !proving_.empty(); }
  std::vector<Connection> advance(std::span<const pollfd> polled);

  // For a caller that waits for nothing else: returns the next connection. Throws DeadlineExceeded.
  Connection next(Deadline deadline);

 private:
  void take_new();
  bool make_room();
  std::string refuse(const Greeting& theirs);

  const FileDescriptor& listener_;
  const Access access_;
  const Greeting who_;
  const Refuse refuse_;
  const Bound bound_;
  const std::size_t most_;
  std::set<decltype(Greeting::random)> opened_;         // the random numbers of true openings so far
  std::vector<std::unique_ptr<AcceptingEnd>> proving_;  // the oldest first
  std::vector<Connection> accepted_;                    // for next
  bool no_descriptors_ = false;                         // this process can have no more for now
};

}  // namespace lockstep::transport
