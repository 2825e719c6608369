// Splits a stream of bytes into lines.
#pragma once

#include <functional>
#include <string>

namespace lockstep::launch {

// The last line may lack its end. A line longer than `longest` comes in pieces. With `redraws`, text that ends with a
// carriage return is a line too, which the next one replaces on the screen.
class Lines {
 public:
  struct Options {
    std::size_t longest = 64 * 1024;
    bool redraws = false;
  };
  Lines() : Lines(Options()) {}
  explicit Lines(Options options) : options_(options) {}

  using Take = std::function<void(const std::string& line, bool is_replaced)>;
  void add(const char* bytes, std::size_t count, const Take& take) {
    for (std::size_t i = 0; i < count; ++i) {
      const bool returns = options_.redraws && bytes[i] == '\r' && !(i + 1 < count && bytes[i + 1] == '\n');
      const bool ends = returns || bytes[i] == '\n';
      if (!ends) begun_.push_back(bytes[i]);
      if (!ends && begun_.size() < options_.longest) continue;
      take(begun_, returns);
      begun_.clear();
    }
  }
  void finish(const Take& take) {
    if (!begun_.empty()) take(begun_, false);
    begun_.clear();
  }

 private:
  Options options_;
  std::string begun_;
};

}  // namespace lockstep::launch
