// The stacks of all threads of this process.
#pragma once

#include <string>

namespace lockstep {

// A line for each thread, with its number and name, and one for each of its frames: the function where its library
// exports it, and the library with an offset, as addr2line -e takes it. Threads that do not answer within a second are
// listed without frames. Uses a signal (SIGRTMIN + 7): calls of the system are restarted, but sleeps may end early.
// Any thread.
std::string stacks_of_all_threads();

}  // namespace lockstep
