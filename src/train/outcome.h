// The results of fit and evaluate, as the chief tells them to the other processes of a cluster with parameter servers.
#pragma once

#include <string>

#include "lockstep/train/logs.h"

namespace lockstep::train {

std::string print(const Logs& logs);
std::string print(const History& history);

// Throws Error where the text is no such result.
template <class Result>
Result parse(const std::string& text);
template <>
Logs parse<Logs>(const std::string& text);
template <>
History parse<History>(const std::string& text);

}  // namespace lockstep::train
