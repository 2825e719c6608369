// The stacks of all threads of this process.
#pragma once

#include <string>

namespace lockstep {

// Returns a line for each thread, with its number and name, and one for each of its frames. A frame is the function
// where its library exports it, and the library with an offset, as addr2line -e takes it. Threads that do not answer
// within a second have no frames. A signal asks them (SIGRTMIN + 7): system calls restart, but sleeps may end early.
// Any thread.
std::string stacks_of_all_threads();

}  // namespace lockstep
