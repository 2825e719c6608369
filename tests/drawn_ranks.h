// For tests: how the ranks of a drawn program end.
#pragma once

#include <atomic>
#include <cmath>
#include <thread>

#include "drawn_net.h"
#include "lockstep/collective/group.h"

namespace lockstep {

// How the ranks of a program ended.
struct Ended {
  std::optional<std::string> refused = {};  // what the first that threw says
  std::string wrong = {};
};

// Runs body(group) on one thread a rank. LibTorch's own errors are refusals where the program is wrong on purpose.
inline Ended on_drawn_ranks(int size, bool takes_libtorch, const std::function<void(const Group&)>& body) {
  const auto groups = make_thread_groups(size);
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
        body(groups[i]);
      } catch (const DeadlineExceeded& error) {
        end_all(wrong[i], error.what());
      } catch (const Error& error) {
        end_all(refused[i], error.what());
      } catch (const c10::Error& error) {
        end_all(takes_libtorch ? refused[i] : wrong[i], error.what_without_backtrace());
      } catch (const std::exception& error) {
        end_all(wrong[i], error.what());
      }
    });
  }
  threads.clear();
  if (first == groups.size()) return {};
  if (const auto& says = wrong[first]; !says.empty()) return {.wrong = says};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (refused[i].empty())
      return {.wrong = text("rank ", i, " ", wrong[i].empty() ? "was not told" : wrong[i], " where rank ", first.load(),
                            " says: ", refused[first])};
  }
  return {.refused = refused[first]};
}

// In 16 bits: empty where the error of all values together is at most twice that of `plain`.
inline std::string differences_in_16_bits(const Values& found, const Values& exact, const Values& plain) {
  double error = 0, allowed = 0;
  for (const auto& [name, value] : found) {
    if (value.sizes() != exact.at(name).sizes()) return text(name, " has another shape");
    error += (value - exact.at(name)).pow(2).sum().item<double>();
    allowed += (plain.at(name) - exact.at(name)).pow(2).sum().item<double>();
  }
  if (error <= 4 * allowed) return "";
  return text("the error is ", std::sqrt(error), ", LibTorch's ", std::sqrt(allowed));
}

}  // namespace lockstep
