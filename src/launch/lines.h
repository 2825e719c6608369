// Splits a stream of bytes into lines.
#pragma once

#include <functional>
#include <string>

namespace lockstep::launch {

// The last line may lack its end. What is longer than a line may be comes in pieces.
class Lines {
 public:
  explicit Lines(std::size_t longest = 64 * 1024) : longest_(longest) {}

  using Take = std::function<void(const std::string& line)>;
  void add(const char* bytes, std::size_t count, const Take& take);
  void finish(const Take& take);

 private:
  std::size_t longest_;
  std::string begun_;
};

}  // namespace lockstep::launch
