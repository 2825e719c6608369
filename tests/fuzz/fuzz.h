// One fuzzer a program: fuzz() is called with bytes of libFuzzer's finding. Bad bytes must throw an Error; any other
// exception, and each report of a sanitizer, is a finding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {

void fuzz(const std::string& bytes);

}  // namespace lockstep

extern "C" __attribute__((used)) int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    lockstep::fuzz({reinterpret_cast<const char*>(data), size});
  } catch (const lockstep::Error&) {
  }
  return 0;
}
