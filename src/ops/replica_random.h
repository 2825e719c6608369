// A replica's own random numbers, for any module: torch::dropout and its kin take no generator, and LibTorch has one
// default CPU generator for the process, under a lock. A thread-local dispatch key, used as autocast uses its own,
// fills in the replica's generator wherever a random operator was given none.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>

namespace lockstep::ops {

// One thread at a time.
class ReplicaRandom {
 public:
  // On a GPU `seed` sets the generator that LibTorch keeps for that device.
  explicit ReplicaRandom(c10::Device device = c10::kCPU);

  // Begins the sequence that belongs to `seed`.
  void seed(std::uint64_t seed);

  // While this lives, random operators of this thread, and of backwards that it calls, draw on CPU tensors from
  // `random` when they are given no generator.
  class Use {
   public:
    explicit Use(ReplicaRandom& random);

   private:
    const c10::DebugInfoGuard generator_;
    const c10::impl::IncludeDispatchKeyGuard key_;
  };

 private:
  c10::Device device_;
  at::Generator generator_;
};

// The generator from which LibTorch's CPU operators draw in this thread: a replica's, or the default one.
at::Generator generator_of_thread();

// Read and set the state of the generator that LibTorch keeps for a GPU. Any thread.
at::Tensor state_of_generator(c10::Device gpu);
void set_state_of_generator(c10::Device gpu, const at::Tensor& state);

}  // namespace lockstep::ops
