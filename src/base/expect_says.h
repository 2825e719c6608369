// For tests: what an exception says.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "lockstep/error.h"

namespace lockstep {

// The text of the E that `act` throws; "nothing was thrown", or what else was.
template <class E = Error, class Act>
std::string message_of(const Act& act) {
  try {
    act();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another type: ") + error.what();
  }
  return "nothing was thrown";
}

inline void expect_says(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

}  // namespace lockstep
