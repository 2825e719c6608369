// Hosts on one machine: network namespaces on a switch. Needs root and iproute2.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/text.h"

namespace lockstep {

// They end with their owner.
class Hosts {
 public:
  explicit Hosts(int count) : name_(text("lockstep", getpid())), count_(count) {
    try {
      run(text("ip netns add ", switch_name()));
      run(text("ip -n ", switch_name(), " link set lo up"));
      run(text("ip -n ", switch_name(), " link add bridge type bridge"));
      run(text("ip -n ", switch_name(), " addr add ", switch_address(), "/24 dev bridge"));
      run(text("ip -n ", switch_name(), " link set bridge up"));
      for (int h = 0; h < count; ++h) {
        run(text("ip netns add ", name(h)));
        run(text("ip -n ", name(h), " link set lo up"));
        run(text("ip -n ", switch_name(), " link add port", h, " type veth peer name eth0 netns ", name(h)));
        run(text("ip -n ", switch_name(), " link set port", h, " master bridge up"));
        run(text("ip -n ", name(h), " addr add ", address(h), "/24 dev eth0"));
        run(text("ip -n ", name(h), " link set eth0 up"));
      }
    } catch (...) {
      remove();
      throw;
    }
  }
  ~Hosts() { remove(); }
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  static std::string address(int host) { return text("10.77.0.", host + 1); }
  static std::string switch_address() { return "10.77.0.254"; }

  // The command that runs `command` there.
  std::vector<std::string> command(int host, std::vector<std::string> command) const {
    const std::vector<std::string> there{"/usr/bin/env", "ip", "netns", "exec", name(host)};
    command.insert(command.begin(), there.begin(), there.end());
    return command;
  }

  void take_link_down(int host) const { run(text("ip -n ", switch_name(), " link set port", host, " down")); }

  // Runs act() in a thread whose new sockets are at the switch.
  template <class Act>
  void at_switch(const Act& act) const {
    std::exception_ptr error;
    std::thread([&] {
      try {
        const FileDescriptor there(open(("/run/netns/" + switch_name()).c_str(), O_RDONLY | O_CLOEXEC));
        if (setns(there.get(), CLONE_NEWNET) != 0) throw std::runtime_error("cannot enter " + switch_name());
        act();
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
  }

 private:
  std::string name(int host) const { return text(name_, "h", host); }
  std::string switch_name() const { return name_ + "s"; }

  static void run(const std::string& line) {
    if (std::system(line.c_str()) != 0) throw std::runtime_error("failed (are you root?): " + line);
  }

  void remove() const {
    std::string line = "ip netns del " + switch_name();
    for (int h = 0; h < count_; ++h) line += "; ip netns del " + name(h);
    if (std::system(("(" + line + ") 2>/dev/null").c_str()) != 0) return;  // what was not made
  }

  const std::string name_;
  const int count_;
};

}  // namespace lockstep
