// Copies of arrays that are too large to be worth a place in the caches.
#pragma once

#include <cstddef>

namespace lockstep::kernels {

// Copies as memcpy, but past the caches. Other threads see the copy after finish_copies and a release.
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes);
void finish_copies();

}  // namespace lockstep::kernels
