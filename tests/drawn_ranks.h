// For tests: how the ranks of a drawn program end.
#pragma once

#include <atomic>
#include <cmath>
#include <thread>
#include <type_traits>

#include "drawn_net.h"
#include "lockstep/collective/group.h"

namespace lockstep {

constexpr double kDrawnTimeoutSeconds = 10;

// How the ranks of a program ended.
template <class Value>
struct Ended {
  std::vector<Value> values;                // [rank], where none threw
  std::optional<std::string> refused = {};  // what the first that threw says
  std::string wrong = {};
};

// Runs body(group) on one thread a rank, and waits there for the others. A lockstep::Error is a refusal, but for a
// deadline that ran out; LibTorch's own errors are refusals where the program is wrong on purpose.
template <class Body, class Value = std::invoke_result_t<Body, const Group&>>
Ended<Value> on_drawn_ranks(int size, bool is_wrong_on_purpose, const Body& body) {
  const auto groups = make_thread_groups(size);
  Ended<Value> ended{std::vector<Value>(groups.size())};
  std::vector<std::string> refused(groups.size()), wrong(groups.size());
  std::atomic<std::size_t> first{groups.size()};
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto end_all = [&](std::string& kind, const std::string& says) {
        auto none = groups.size();
        first.compare_exchange_strong(none, i);
        kind = says;
        groups[i].abort(says);
      };
      try {
        ended.values[i] = body(groups[i]);
        groups[i].barrier(Deadline::after(std::chrono::duration<double>(kDrawnTimeoutSeconds)));
      } catch (const DeadlineExceeded& error) {
        end_all(wrong[i], error.what());
      } catch (const Error& error) {
        end_all(refused[i], error.what());
      } catch (const c10::Error& error) {
        end_all(is_wrong_on_purpose ? refused[i] : wrong[i], error.what_without_backtrace());
      } catch (const std::exception& error) {
        end_all(wrong[i], error.what());
      }
    });
  }
  threads.clear();
  if (first == groups.size()) return ended;
  ended.wrong = wrong[first];
  for (std::size_t i = 0; i < groups.size() && ended.wrong.empty(); ++i) {
    if (!refused[i].empty()) continue;
    ended.wrong = text("rank ", i, " ", wrong[i].empty() ? "was not told" : wrong[i], " where rank ", first.load(),
                       " says: ", refused[first]);
  }
  if (ended.wrong.empty()) ended.refused = refused[first];
  return ended;
}

// In 16 bits: empty where the error of all values together is at most twice that of `plain`.
inline std::string differences_in_16_bits(const Values& found, const Values& exact, const Values& plain) {
  double error = 0, allowed = 0;
  for (const auto& [name, value] : exact) {
    if (!found.contains(name)) return text("has no ", name);
  }
  for (const auto& [name, value] : found) {
    if (value.sizes() != exact.at(name).sizes()) return text(name, " has another shape");
    error += (value - exact.at(name)).pow(2).sum().item<double>();
    allowed += (plain.at(name) - exact.at(name)).pow(2).sum().item<double>();
  }
  if (error <= 4 * allowed) return "";
  return text("the error is ", std::sqrt(error), ", LibTorch's ", std::sqrt(allowed));
}

}  // namespace lockstep
