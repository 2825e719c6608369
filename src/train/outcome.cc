#include "train/outcome.h"

#include <cstdlib>
#include <ios>
#include <sstream>
#include <vector>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::train {
namespace {

// A name's row: the name, a tab, and its values in C's hexadecimal notation, which is exact.
using Row = std::pair<std::string, std::vector<double>>;

std::string print_rows(const std::vector<Row>& rows) {
  std::ostringstream out;
  out << std::hexfloat;
  for (const auto& [name, values] : rows) {
    out << name << '\t';
    for (const double value : values) out << ' ' << value;
    out << '\n';
  }
  return out.str();
}

std::vector<Row> parse_rows(const std::string& printed) {
  std::vector<Row> rows;
  std::istringstream lines(printed);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    if (tab == std::string::npos) throw Error(text("the chief's result cannot be read: ", line));
    auto& row = rows.emplace_back(line.substr(0, tab), std::vector<double>());
    std::istringstream words(line.substr(tab + 1));
    for (std::string word; words >> word;) row.second.push_back(std::strtod(word.c_str(), nullptr));
  }
  return rows;
}

constexpr const char* kEpochs = "";  // no log has this name

}  // namespace

std::string print(const Logs& logs) {
  std::vector<Row> rows;
  for (const auto& [name, value] : logs) rows.push_back({name, {value}});
  return print_rows(rows);
}

std::string print(const History& history) {
  std::vector<Row> rows{{kEpochs, {history.epoch.begin(), history.epoch.end()}}};
  rows.insert(rows.end(), history.history.begin(), history.history.end());
  return print_rows(rows);
}

template <>
Logs parse<Logs>(const std::string& text) {
  Logs logs;
  for (const auto& [name, values] : parse_rows(text)) logs.set(name, values.at(0));
  return logs;
}

template <>
History parse<History>(const std::string& text) {
  History history;
  for (const auto& [name, values] : parse_rows(text)) {
    if (name != kEpochs) history.history[name] = values;
    if (name != kEpochs) continue;
    for (const double epoch : values) history.epoch.push_back(static_cast<int>(epoch));
  }
  return history;
}

}  // namespace lockstep::train
