// Calls of MPI that run, with the memory that they use.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "collective/calls.h"
#include "collective/mpi/library.h"

namespace lockstep::collective::mpi {

// The memory that `allocate` of a group, and of those that are split from it, gave out. Any thread.
class Blocks {
 public:
  Memory allocate(std::size_t bytes);

  // A handle of the block that has these bytes; null where none has.
  Memory find(const std::byte* data, std::size_t bytes) const;

 private:
  struct Table {
    struct Block {
      std::weak_ptr<std::byte[]> memory;
      std::size_t bytes;
    };
    Mutex mutex;
    std::map<const std::byte*, Block> blocks LOCKSTEP_GUARDED_BY(mutex);  // by their first bytes
  };
  const std::shared_ptr<Table> table_ = std::make_shared<Table>();
};

// Parts of a buffer as MPI takes them: elements from `data` on.
struct Parts {
  std::byte* data = nullptr;
  std::vector<int> counts, places;
};

// One call of MPI, or several side by side. MPI cannot take back what it has begun: after a failure it may read and
// write for as long as the process lives. So it gets blocks of `allocate`, whose handle an operation keeps, and copies
// of all other memory, which belongs to the caller again after an exception. One thread at a time.
class Operation {
 public:
  explicit Operation(const Blocks& blocks) : blocks_(blocks) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Return the place at which MPI reads or writes these bytes; `updates`: both. `copy`: not in place, since another
  // buffer overlaps them.
  const std::byte* reads(const std::byte* data, std::size_t bytes, bool copy = false);
  std::byte* writes(std::byte* data, std::size_t bytes);
  std::byte* updates(std::byte* data, std::size_t bytes);

  // As these, for slices of a buffer, in order. `packed`: MPI wants them one after the other.
  const Parts& reads(const ConstBuffer& buffer, const std::vector<Slice>& slices, bool packed, bool copy);
  const Parts& writes(const Buffer& buffer, const std::vector<Slice>& slices);

  // Calls a function of MPI, whose last argument is the request.
  template <class Function, class... Arguments>
  void call(const char* name, Function* function, const Arguments&... arguments) {
    Handle request = 0;
    require(function(arguments..., &request), name);
    requests_.push_back({request, name});
  }

  // A message of so many elements was asked for by the last call.
  void expect(int from, int count, Handle dtype);

  // Returns true when all calls have ended. Throws as `require` does, and InvalidArgument for a message that is shorter
  // than its recv.
  bool test();

  // After the calls have ended: copies results to where the caller wants them, and makes the operation empty.
  void finish();

  bool runs() const { return next_ < requests_.size(); }

 private:
  struct Request {
    Handle handle;
    const char* function;
    int from = -1, count = 0;  // of a message that is received
    Handle dtype = 0;
  };
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };

  bool keeps(const std::byte* data, std::size_t bytes);
  std::byte* take(std::size_t bytes);
  void require_length(const Request& request, const Status& status) const;
  template <class Visit>
  const Parts& lay(std::byte* data, std::size_t element, const std::vector<Slice>& slices, bool in_place,
                   const Visit& visit_copies);

  const Blocks& blocks_;
  std::vector<Request> requests_;
  std::size_t next_ = 0;  // the first that runs
  std::vector<Copy> results_;
  std::deque<Parts> parts_;
  std::vector<Memory> kept_;
  Memory copies_;
  std::size_t bytes_ = 0, used_ = 0;  // of copies_
};

// Leaves an operation alone whose calls may never end, with its memory, until the process ends.
void leave(std::unique_ptr<Operation> operation);

}  // namespace lockstep::collective::mpi
