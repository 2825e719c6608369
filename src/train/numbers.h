// Numbers as text that reads back to the same bits.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "base/text.h"

namespace lockstep {

inline std::string print_numbers(const std::vector<double>& numbers) {
  std::string line;
  for (const double number : numbers) line += text(std::hexfloat, number, ' ');
  return line;
}

inline std::vector<double> parse_numbers(const std::string& line) {
  std::vector<double> numbers;
  const char* at = line.c_str();
  for (char* end = nullptr;; at = end) {
    const double number = std::strtod(at, &end);
    if (end == at) return numbers;
    numbers.push_back(number);
  }
}

}  // namespace lockstep
