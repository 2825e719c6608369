// A number that each rank of a group shows to the others, who ask for it when they must know who is late.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::transport {

// One rank's end. Any thread may call, but for `answer`.
class ShownNumbers {
 public:
  virtual ~ShownNumbers() = default;

  // Shows a number in the place of the one before, at first 0.
  virtual void show(std::int64_t number) = 0;

  // Asks all ranks. A rank that shares memory with this one needs not be asked.
  virtual void ask() = 0;

  // Hears what was asked and told, and tells those who have asked. Waits for nobody. One thread at a time, as
  // Channels::exchange, which answers too.
  virtual void answer() = 0;

  // Returns what the ranks have told. A rank that has not told it since it was asked may show another number by now.
  struct Told {
    std::vector<std::int64_t> numbers;  // [rank]
    std::vector<bool> since_asked;      // [rank]; true for ranks that are gone
  };
  virtual Told told() = 0;
};

}  // namespace lockstep::transport
