// Splits a stream of bytes into lines.
#pragma once

#include <functional>
#include <string>

namespace lockstep::launch {

// The last line may lack its end. What is longer than a line may be comes in pieces. With `redraws`, text that ends
// with a carriage return is a line too, which the next one replaces on the screen.
class Lines {
 public:
  struct Options {
    std::size_t longest = 64 * 1024;
    bool redraws = false;
  };
  Lines() : Lines(Options()) {}
  explicit Lines(Options options) : options_(options) {}

  using Take = std::function<void(const std::string& line, bool is_replaced)>;
  void add(const char* bytes, std::size_t count, const Take& take);
  void finish(const Take& take);

 private:
  Options options_;
  std::string begun_;
};

}  // namespace lockstep::launch
