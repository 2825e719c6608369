// The source of random numbers. Torch-free.
//
// Everything random derives from one seed: initial values, shuffling, and each replica's own numbers in each step. Two
// runs of a program with the same seed and number of replicas get the same bits, whatever the timing of the threads.
#pragma once

#include <cstdint>

namespace lockstep {

// Sets the seed and starts its sequence anew, as keras.utils.set_random_seed. Initial values, shuffling, map functions
// and replicas draw from it (torch::randn in a thread of your own from torch::manual_seed). The seed is 0 until then.
// Any thread may call; what other threads draw meanwhile depends on timing.
void set_random_seed(std::uint64_t seed);

// The next seed of the sequence: each model, data set and loop takes one when it is made.
std::uint64_t next_random_seed();

}  // namespace lockstep
