// A checkpoint that several processes, which see one folder, write together: each a part of the bytes of its large
// tensors. The file is as write_archive writes it, but for the order of the tensors:
//
//   | header | other tensors | large tensors                 |
//   | writer 0               | writer 0 | writer 1 | ...     |
//
// Parts begin at whole pages, so that two hosts do not write to one page of a network's file system.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/safetensors.h"
#include "lockstep/base/deadline.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

// Bytes of the large tensors, counted from the first of them.
struct ByteRange {
  std::size_t begin = 0, end = 0;
  std::size_t size() const { return end - begin; }
};

// Bytes that follow each other in the file, and lie in several places of the memory.
using Pieces = std::vector<std::span<const std::byte>>;

// Returns the part of `large` that writer `writer` of `writers` writes. The parts follow each other and may be empty.
ByteRange part_of_writer(const NamedTensors& large, int writer, int writers);

// Writer 0's, which makes the file. Not thread safe but for `abandon`.
class SharedArchive {
 public:
  // Begins a file beside checkpoint_file(path). `small`: the entries and all other tensors. Throws IoError.
  SharedArchive(const std::string& path, Archive small, NamedTensors large);
  ~SharedArchive();
  SharedArchive(const SharedArchive&) = delete;
  SharedArchive& operator=(const SharedArchive&) = delete;

  // For write_part in the other writers.
  const std::string& temporary() const { return temporary_; }
  std::size_t large_begin() const { return large_begin_; }  // in the file

  // Writes the rest and `part`, this writer's; waits for the others of `writers`; then the file appears at its path.
  // Throws IoError, also at the deadline and once `abandon` was called; then nothing is left.
  void finish(const Pieces& part, int writers, Deadline deadline);

  // From then on, waits for no other writer that has not finished. Any thread.
  void abandon(std::chrono::seconds after = {}) { abandoned_at_ = Deadline::Clock::now() + after; }

 private:
  std::uint32_t checksum_of(int writer, Deadline deadline) const;  // of its part, once it is written

  const std::string path_;
  const Archive small_;
  const NamedTensors large_;
  AtomicFile file_;
  const std::string temporary_;
  std::string header_;
  std::size_t large_begin_ = 0;
  int writers_ = 1;
  std::atomic<Deadline::Clock::time_point> abandoned_at_ = Deadline::Clock::time_point::max();
};

// Called in another writer: writes its part, and says so to writer 0. Throws IoError.
void write_part(const std::string& temporary, std::size_t large_begin, std::size_t begin, const Pieces& part,
                int writer);

}  // namespace lockstep::checkpoint
