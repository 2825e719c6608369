// The allocator that Lockstep puts under LibTorch's CPU tensors when the library is loaded.
//
// It keeps freed blocks for the next tensor of that size instead of giving them back to the system, whose page faults
// would take a third of a training step. Set the environment variable LOCKSTEP_ALLOCATOR=system to keep LibTorch's own.
#pragma once

#include <cstddef>

namespace lockstep {

struct MemoryStats {
  std::size_t reserved_bytes = 0;  // taken from the system and not given back
  std::size_t cached_bytes = 0;    // the part that is free for the next tensor
};

// Zeros when LibTorch's own allocator serves. Any thread may call; the two figures are not taken at one instant.
MemoryStats memory_stats();

// Gives cached blocks back to the system: for a program that goes on to something else, or shares its machine. The next
// tensors take longer once. The allocator does so itself where the system refuses more memory, or where tensors and
// cache would pass three quarters of the memory of this process. That is its share with other ranks on its host. Any
// thread. Follows torch.cuda.empty_cache.
void release_memory();

}  // namespace lockstep
